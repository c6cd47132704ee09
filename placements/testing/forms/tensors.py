"""Draws what stands in slots for tensors."""

import math
import random

import torch

from placements.testing.forms.form import Form
from placements.testing.forms.operands import (
    FormOperand,
    Place,
    Types,
    draw_value,
    place_value,
    places,
    size_of_letter,
    varying,
)
from placements.testing.forms.shapes import ASKED_SHAPES, EQUATIONS, INTEGER, SHAPES, UNIT
from placements.testing.forms.signatures import FormSignature, FormSlot
from placements.types.axis import AxisType, P, R, V
from placements.types.index import Index

MESHES: tuple[dict[str, int], ...] = ({"a": 2}, {"a": 3}, {"a": 2, "b": 2})


DIGITS = "123458"  # letters of shapes that stand for their own size


class DrawsTensors:
    """Draws the operands of one form of one signature.

    All its operands share the sizes of their letters, and mostly their cuts.
    """

    def __init__(
        self, rng: random.Random, signature: FormSignature, about: str, is_asked: bool
    ) -> None:
        self.rng, self.signature, self.about = rng, signature, about
        self.is_odd = False  # whether what is drawn now is what the form is about
        self.is_asked = is_asked  # whether somebody asked what the form is about
        self.op = signature.op
        sizes = rng.choices(MESHES, weights=(5, 3, 3))[0]
        self.form = Form(self.op, signature.overload, dict(sizes))
        recipes = SHAPES.get(self.op)
        if is_asked:
            recipes = ASKED_SHAPES.get(f"{self.op} {about}", recipes)
        self.shapes: dict[str, str] = {}
        if recipes:
            pairs = [pair.split("=") for pair in rng.choice(recipes).split()]
            self.shapes = {name: letters for name, letters in pairs}
            letters = "".join(sorted(set("".join(self.shapes.values())) - set(DIGITS)))
        else:
            letters = "ABCD"[: rng.choices((0, 1, 2, 3, 4), weights=(3, 20, 40, 30, 7))[0]]
        self.letters = letters
        self.letter_sizes = {x: size_of_letter(rng, sizes) for x in letters or "A"}
        self.letter_sizes |= {x: int(x) for x in DIGITS}  # sizes that an op must have
        self.has_double = "b" in letters
        if self.has_double:
            self.letter_sizes["b"] = 2 * self.letter_sizes["B"]
        self.types = Types(rng, sizes, letters)
        self.dtype = rng.choices(
            (torch.float64, torch.int64, torch.float32, torch.bool), weights=(80, 10, 5, 5)
        )[0]
        if self.op == "view_as_real":
            self.dtype = torch.complex128
        if self.op in INTEGER:
            self.dtype = rng.choices((torch.int64, torch.bool), weights=(7, 3))[0]
        self.domain = rng.choice(("", "", "distinct", "unit"))
        if self.op in UNIT:
            self.domain = "unit"
        if self.op in ("grouped_mm", "_grouped_mm"):
            self.dtype = torch.float32
            aligned = 4 * math.prod(sizes.values())  # torch wants rows of whole 16 bytes
            self.letter_sizes |= {"B": aligned, "D": aligned}
        self.first: FormOperand | None = None
        self.literal_dim: int | None = None
        self.keys: dict[str, AxisType] = {}
        self.sizes_read: set[tuple[str, int]] = set()
        self.takes_gradients = rng.random() < 0.85

    def operand(
        self, letters: str, dtype: torch.dtype, domain: str = "", index: int | None = None
    ) -> FormOperand:
        rng, sizes = self.rng, self.form.sizes
        name = "xyzwuvst"[len(self.form.operands) % 8] + "_" * (
            len(self.form.operands) // 8
        )
        shape = [self.letter_sizes[x] for x in letters]
        cut = letters.upper() if self.has_double else letters
        types = self.types.draw(cut, shape, self.is_odd)
        if self.is_asked and self.is_odd and not letters:  # mostly each rank's own number
            apart: list[AxisType] = [R, V, V, P]
            types = {axis: rng.choice(apart) for axis in sizes}
        if self.op in ("grouped_mm", "_grouped_mm"):
            # Torch reads beyond the rows of a piece where offsets count all rows.
            rows = letters.find("A" if "A" in letters else "C")
            types = {a: R if getattr(t, "dim", -1) == rows else t for a, t in types.items()}
        if self.op == "scaled_dot_product_attention" and letters.endswith("ED"):
            # Torch reads beyond a piece where keys and values differ in number.
            types = self.keys = self.keys or types
        if dtype is torch.bool or (domain.startswith("rows:") and rng.random() < 0.8):
            types = {axis: R if t.letter == "P" else t for axis, t in types.items()}
        uncut = [
            d
            for d in range(len(shape))
            if d not in {getattr(t, "dim", -1) for t in types.values()}
        ]
        # Varying operands may differ in shape, unless others must fit them.
        alone = self.first is None and self.op not in SHAPES and bool(uncut)
        ragged = rng.random() < 0.2 and alone
        values: dict[Place, torch.Tensor] = {}
        for number, where in enumerate(places(sizes, varying(types))):
            own = list(shape)
            if ragged and where:
                own[uncut[0]] += number
            values[where] = draw_value(rng, own, dtype, domain)
        made = FormOperand(name, types, values)
        made.locals = place_value(values, types, sizes, rng)
        if index is not None:
            made.index = Index(index)
        made.takes_gradient = self.takes_gradients
        if self.is_odd and rng.random() < 0.4:
            made.takes_gradient = False
        self.form.operands[name] = made
        return made

    def sized(self) -> FormOperand:
        """Return an operand to read a size from; a factory has none of its own."""
        made = [x for x in self.form.operands.values() if x.ndim]
        if made:
            return self.rng.choice(made)
        letters = self.letters or "A"
        self.letter_sizes.setdefault("A", 2)
        made_now = self.operand(letters, torch.float64)
        self.first = self.first or made_now
        return made_now

    def sequence(self, items: list[str]) -> str:
        inner = ", ".join(items)
        if self.rng.random() < 0.5:
            return f"[{inner}]"
        return f"({inner},)" if items else "()"

    def tensor(self, slot: FormSlot) -> str:
        rng = self.rng
        letters = self.shapes.get(slot.name)
        if letters is None:
            letters = self.letters
            if self.first is not None and rng.random() < 0.45:
                letters = letters[rng.randint(0, len(letters)) :]
                letters = "".join("1" if rng.random() < 0.25 else x for x in letters)
        if self.first is not None and slot.name != "out" and rng.random() < 0.07:
            return self.constant(letters)
        dtype, domain = self.dtype, self.domain
        if self.first is not None and rng.random() < (0.3 if self.is_odd else 0.03):
            dtype = rng.choice((torch.float64, torch.float32, torch.int64, torch.bool))
        if slot.name == "repeats":
            return self.repeated(letters)
        if slot.name in ("weights", "pos_weight"):
            dtype = torch.float64
        made = self.operand(letters, dtype, domain)
        if self.first is None:
            self.first = made
        elif slot.name in ("start", "tensor_indices_or_sections"):
            self.form.traits.add("tensor as integer")
        elif self.op.endswith("_as"):
            self.form.traits.add("size of another")
        return made.name

    def repeated(self, letters: str) -> str:
        """Draw how often rows are repeated, never a negative number on any rank.

        Where `output_size` is the sum of numbers of which some are negative, torch writes
        beyond its memory.
        """
        made = self.operand(letters, torch.int64, "rows:4")
        made.locals = place_value(
            made.values, made.types, self.form.sizes, self.rng, natural=True
        )
        self.first = self.first or made
        return made.name

    def constant(self, letters: str) -> str:
        """Write a tensor that the line itself makes, of plain or of read sizes."""
        x = self.sized().name
        shape = [self.letter_sizes[letter] for letter in letters]
        plain = f"torch.ones({shape}, dtype={self.dtype})"
        if self.op in SHAPES:
            self.form.traits.add("plain size")
            return plain
        made = self.rng.choice(
            (plain, plain, f"torch.ones_like({x})", f"torch.zeros_like({x})",
             f"torch.ones({x}.shape, dtype={self.dtype})", f"{x}.new_zeros({x}.size())",
             f"torch.full(({x}.shape[-1],), 2, dtype={self.dtype})")
        )  # fmt: skip
        if made == plain:
            self.form.traits.add("plain size")
        return made

    def index(self, slot: FormSlot) -> str:
        rng = self.rng
        addressed = self.shapes.get(
            "weight" if self.op == "embedding" else "self", self.letters
        )
        addressed = (
            self.shapes.get("input", addressed) if slot.name == "target" else addressed
        )
        letter = rng.choice(addressed) if addressed else "A"
        if self.op == "embedding":
            letter = "A"
        elif slot.name == "target":
            letter = "B"
        elif (
            addressed and self.literal_dim is not None and self.literal_dim < len(addressed)
        ):
            letter = addressed[self.literal_dim]
        rows = self.letter_sizes[letter]
        if slot.name == "offs":
            return self.offsets()
        letters = self.shapes.get(
            slot.name, rng.choice(("", self.letters[:1], self.letters))
        )
        return self.rows_of(letters, rows)

    def rows_of(self, letters: str, rows: int) -> str:
        """Numbers of rows, said or not said to be that, or made by arithmetic."""
        domain = rows if self.rng.random() < 0.7 else None
        name = self.operand(letters, torch.int64, f"rows:{rows}", domain).name
        if self.rng.random() < 0.7 or (self.is_asked and not self.is_odd):
            return name
        self.form.traits.add("index by arithmetic")
        return self.rng.choice((f"({name} + 0)", f"({name} * 2 // 2)", f"({name} // 2)"))

    def own_rows(self, dim: int) -> str:
        """Numbers of rows of a dim of the first operand as each rank finds them."""
        letter = self.letters[dim : dim + 1]
        if self.first is None or not letter:
            return ":"
        if self.rng.random() < 0.4:
            return f"torch.arange({self.first.name}.shape[{dim}])"
        dtype = self.rng.choice((torch.bool, torch.int64))
        name = self.operand(letter, dtype).name
        ways = ("{}.argsort()", "{}.nonzero().view(-1)", "torch.where({})[0]")
        return self.rng.choice(ways).format(name)

    def offsets(self) -> str:
        """Draw where the groups of a grouped product end: ascending, up to all rows."""
        made = self.operand("C", torch.int32)
        for where, value in made.values.items():
            ends = sorted(self.rng.randint(0, self.letter_sizes["A"]) for _ in value)
            ends[-1:] = [self.letter_sizes["A"]]
            made.values[where] = torch.tensor(ends, dtype=torch.int32)
        made.locals = place_value(made.values, made.types, self.form.sizes, self.rng)
        return made.name

    def mask(self, slot: FormSlot) -> str:
        letters = self.letters
        if self.rng.random() < 0.4:
            letters = letters[self.rng.randint(0, len(letters)) :]
        made = self.operand(letters, torch.bool)
        return made.name

    def tensors(self, slot: FormSlot) -> str:
        count = self.rng.choice((1, 2, 2, 3))
        names: list[str] = []
        for _ in range(count):
            letters = self.shapes.get(slot.name, self.letters)
            made = self.operand(letters, self.dtype, self.domain)
            self.first = self.first or made
            names.append(made.name)
        if self.rng.random() < 0.1:
            names[-1] = names[0]
        return self.sequence(names)

    def indices(self, slot: FormSlot) -> str:
        return f"({self.index(slot)},)"

    def equation(self, slot: FormSlot) -> str:
        rng = self.rng
        text = rng.choice(EQUATIONS)
        names: list[str] = []
        inputs = text.split("->")[0].split(",")
        for x in "abcd":
            self.letter_sizes[x] = size_of_letter(rng, self.form.sizes)
        self.types.cut = {axis: rng.choice("ab") for axis in self.form.sizes}
        for letters in inputs:
            plain = letters.replace("...", rng.choice(("", "c")))
            names.append(self.operand(plain, self.dtype, self.domain).name)
        if rng.random() < 0.2:
            return f"{text!r}, [{', '.join(names)}]"
        if rng.random() < 0.2 and "." not in text:
            terms = [
                f"{n}, {[ord(c) - 97 for c in k]}"
                for n, k in zip(names, inputs, strict=True)
            ]
            out = text.split("->")[1] if "->" in text else None
            tail = f", {[ord(c) - 97 for c in out]}" if out is not None else ""
            return ", ".join(terms) + tail
        return f"{text!r}, {', '.join(names)}"
