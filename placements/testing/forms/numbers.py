"""Draws what stands in slots for numbers: literals, numpy, tensors, sizes and ranks."""

import torch

from placements.testing.forms.operands import place_value
from placements.testing.forms.shapes import ASKED_NUMBERS, TWO_DIMS
from placements.testing.forms.signatures import FormSlot
from placements.testing.forms.tensors import DrawsTensors

# Slots that torch still has and does not look at.
_NOT_USED = {("gumbel_softmax", "eps")}


class DrawsNumbers(DrawsTensors):
    """Draws numbers, and sequences of numbers, besides operands."""

    def way(self, weights: tuple[int, ...]) -> str:
        """Draw how a number is written: mostly oddly in the slot that the form is about."""
        ways = ("literal", "numpy", "tensor", "size", "rank")
        odd = (20, 5, 25, 25, 25)
        return self.rng.choices(ways, weights=odd if self.is_odd else weights)[0]

    def read_size(self, dim: int | None = None) -> str:
        """Return a size read from an operand."""
        x = self.sized()
        at = self.rng.randrange(-x.ndim, x.ndim) if dim is None else dim
        return self.rng.choice((f"{x.name}.shape[{at}]", f"{x.name}.size({at})"))

    def count_of(self) -> str:
        x = self.sized()
        return self.rng.choice(
            (self.read_size(), f"{x.name}.numel()", f"len({x.name})",
             f"{self.read_size()} * 2", f"{x.name}.shape.numel()",
             f"math.prod({x.name}.shape)",
             f"{self.read_size()} + 1", f"{self.read_size()} // 2")
        )  # fmt: skip

    def rank(self) -> str:
        """Return the number of this rank; one more, where few slots take 0."""
        text = self.own_rank()
        more = self.is_asked and self.rng.random() < 0.6
        return f"({text} + 1)" if more else text

    def own_rank(self) -> str:
        axis = self.rng.choice(list(self.form.sizes))
        self.form.rank_axes.add(axis)
        self.form.traits.add("rank")
        return self.rng.choice(
            (f"axis_rank({axis!r})", f"current_mesh().coordinate[{axis!r}]")
        )

    def scalar_tensor(self, dtype: torch.dtype, domain: str = "") -> str:
        return self.operand("", dtype, domain).name

    def number(self, slot: FormSlot) -> str:
        rng = self.rng
        if slot.name in ("p", "dropout_p", "label_smoothing") and self.op != "norm":
            literal = rng.choice(("0.5", "0.0", "1.0", "0.25"))
        elif slot.name in ("eps", "rtol", "atol"):
            literal = rng.choice(("0.5", "1e-05", "0.125"))
        else:
            literal = rng.choice(("2", "3", "0.5", "-1", "1", "0", "True", "1.5"))
        way = self.way((52, 16, 16, 11, 5))
        if way == "numpy":
            kind = rng.choice(("float32", "float64", "int64"))
            return f"np.{kind}({literal})"
        if way == "tensor":
            dtype = rng.choice((torch.float64, torch.float64, torch.int64))
            self.form.traits.add("tensor as number")
            return self.scalar_tensor(
                dtype, rng.choice(("", "unit")) if dtype.is_floating_point else ""
            )
        if way == "size":
            self.form.traits.add("size as value")
            text = self.count_of()
            if (self.form.op, slot.name) not in _NOT_USED:
                self.form.settings.append(text)
            return text
        if way == "rank":
            return self.rank()
        return literal

    def integer(self, literal: int, trait: str = "size by position") -> str:
        rng = self.rng
        way = self.way((70, 8, 8, 10, 4))
        if way == "numpy":
            return f"np.int64({literal})"
        if way == "tensor":
            self.form.traits.add("tensor as integer")
            made = self.operand("", torch.int64)
            usual, least = (0.4, 1) if self.is_asked else (0.7, 0)
            for key in made.values:
                made.values[key] = torch.tensor(
                    literal if rng.random() < usual else least + rng.randint(0, 2)
                )
            made.locals = place_value(made.values, made.types, self.form.sizes, rng)
            return made.name
        if way == "size":
            self.form.traits.add(trait)
            return self.count_of() if rng.random() < 0.4 else self.read_size()
        if way == "rank":
            return self.rank()
        return str(literal)

    def int_(self, slot: FormSlot) -> str:
        rng = self.rng
        if slot.name in ("split_size_or_sections", "split_size") and rng.random() < 0.5:
            return self.split_sizes()
        is_step = self.is_asked and slot.name == "step" and self.op == "slice_scatter"
        if is_step and self.is_odd and rng.random() < 0.6:
            return f"{self.rank()} + 1"
        asked = f"{self.op} {slot.name}" if self.is_asked else ""
        pool = ASKED_NUMBERS.get(asked) or {
            "diagonal": (0, 1, -1, 2), "reduction": (0, 1, 2), "num_classes": (-1, 3, 5, 8),
            "decimals": (0, 1), "minlength": (0, 3, 9), "padding_idx": (0, 1, -1),
            "correction": (0, 1), "ignore_index": (-100, 0, 1),
            "output_size": (1, 2, 3, 4, 6, 8, 12),
        }.get(slot.name, (0, 1, 1, 2, 2, 3, -1))  # fmt: skip
        text = self.integer(rng.choice(pool))
        if ".s" in text or "numel" in text or "len(" in text:
            self.form.settings.append(text)
        return text

    def dim(self, slot: FormSlot) -> str:
        n = max(self.first.ndim if self.first else len(self.letters), 1)
        literal = self.rng.randrange(-n, n)
        if self.rng.random() < (0.4 if self.is_odd else 0.8):
            self.literal_dim = literal % n
            return str(literal)
        often = "rank" if self.is_asked else "np"
        way = self.rng.choice(("np", often, "tensor", "rank", "bool"))
        if way == "np":
            return f"np.int64({literal})"
        if way == "tensor":
            return self.integer(literal)
        if way == "bool":
            return "True"
        self.form.never = "each rank means another dim"
        return self.rank()

    def dims(self, slot: FormSlot) -> str:
        n = max(self.first.ndim if self.first else len(self.letters), 1)
        if self.is_asked and self.op == "tensordot" and slot.name == "dims":
            return self.integer(self.rng.choice((0, 1, 2)))  # how many dims
        one = self.rng.random()
        if one < 0.4:
            return self.dim(slot)
        count = self.rng.randint(0 if one > 0.95 else 1, n)
        if self.op in ("permute", "movedim", "moveaxis"):
            count = n if self.op == "permute" else min(n, 2)
            if self.op == "permute" and n > 1 and self.is_odd and self.rng.random() < 0.5:
                return self.other_order(n)
        if self.is_asked and self.op in TWO_DIMS and n > 1 and self.rng.random() < 0.5:
            return self.other_order(2)
        chosen = [d - self.rng.choice((0, 0, n)) for d in self.rng.sample(range(n), count)]
        return self.sequence([str(d) for d in chosen])

    def other_order(self, n: int) -> str:
        """Write the dims in an order that rank 1 of an axis of two changes."""
        self.form.never = "each rank means another dim"
        rank = self.own_rank()
        return self.sequence([rank, f"1 - {rank}", *map(str, range(2, n))])

    def repeats(self, slot: FormSlot) -> str:
        n = max(len(self.letters), 1)
        count = n + self.rng.choice((0, 0, 1))
        return self.sequence(
            [self.integer(self.rng.choice((1, 2, 3))) for _ in range(count)]
        )

    def ints(self, slot: FormSlot) -> str:
        rng = self.rng
        if slot.name == "pad":
            return self.sequence(
                [
                    self.integer(rng.choice((0, 1, 2, -1)))
                    for _ in range(rng.choice((2, 2, 4)))
                ]
            )
        if slot.name in ("split_sizes", "split_size", "split_size_or_sections"):
            return self.split_sizes()
        if slot.name in ("repeats",):
            return self.repeats(slot)
        if slot.name == "shifts":
            return rng.choice((self.integer(1), self.sequence([self.integer(1)]), "(1, 2)"))
        if slot.name == "output_size":  # of a window: a number for each dim of 2d or 3d
            count = next((int(x) for x in self.op if x in "123"), 2)
            return self.sequence([self.integer(rng.randint(1, 3)) for _ in range(count)])
        if slot.name == "indices":
            return self.sequence(
                [self.integer(k) for k in rng.choice(((1,), (1, 2), (0, 2)))]
            )
        counts = (1, 2)
        if self.is_asked:  # of a window: one number for all dims, or for each
            counts = (1, next((int(x) for x in self.op if x in "123"), 2))
        return self.sequence(
            [self.integer(rng.randint(0, 3)) for _ in range(rng.choice(counts))]
        )

    def split_sizes(self) -> str:
        letter = self.rng.choice(self.letters or "A")
        total = self.letter_sizes[letter]
        if self.is_odd and self.rng.random() < 0.3:
            rank = self.rank()
            return self.sequence([rank, f"{total} - {rank}"])
        first = self.rng.randint(0, total)
        return self.sequence([self.integer(first), self.integer(total - first)])
