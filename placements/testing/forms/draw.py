"""Draws call forms: a line of Python, the operands in it, and their types.

A form is drawn without a look at the checker. It counts if the line runs on one device.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from placements.testing.forms.operands import (
    Operand,
    Place,
    Types,
    draw_value,
    place_value,
    places,
    size_of_letter,
    varying,
)
from placements.testing.forms.signatures import Signature, Slot, signatures
from placements.types.axis import AxisType, R
from placements.types.index import Index

# What a line may name besides its operands.
WORDS: dict[str, Any] = {
    "torch": torch, "F": nn.functional, "nn": nn, "np": np, "math": math,
}  # fmt: skip

MESHES: tuple[dict[str, int], ...] = ({"a": 2}, {"a": 3}, {"a": 2, "b": 2})

# Shapes where operands must fit together, by slot; a letter is a size. Elsewhere all
# operands have one shape, or shapes that broadcast to it.
SHAPES: dict[str, tuple[str, ...]] = {
    "mm": ("self=AB mat2=BC",),
    "bmm": ("self=ABC mat2=ACD",),
    "mv": ("self=AB vec=B",),
    "dot": ("self=A tensor=A",),
    "vdot": ("self=A other=A",),
    "inner": ("self=AB other=CB", "self=B other=AB"),
    "matmul": ("self=AB other=BC", "self=B other=BC", "self=ABC other=CD",
               "self=ABC other=ACD", "self=AB other=B"),
    "__rmatmul__": ("other=AB self=BC", "other=B self=BC", "other=ABC self=CD"),
    "linear": ("input=AB weight=CB bias=C", "input=ABC weight=DC bias=D",
    "input=B weight=CB"),
    "addmm": ("self=AC mat1=AB mat2=BC", "self=C mat1=AB mat2=BC"),
    "baddbmm": ("self=ABD batch1=ABC batch2=ACD", "self=D batch1=ABC batch2=ACD"),
    "addmv": ("self=A mat=AB vec=B",),
    "outer": ("self=A vec2=B",),
    "ger": ("self=A vec2=B",),
    "grouped_mm": ("mat_a=AB mat_b=CBD offs=C",),
    "_grouped_mm": ("self=AB mat2=CBD offs=C",),
    "scaled_dot_product_attention": ("query=ABCD key=ABED value=ABED attn_mask=CE",
                                     "query=BCD key=BED value=BED"),
    "layer_norm": ("input=ABC weight=C bias=C", "input=AB weight=B bias=B"),
    "rms_norm": ("input=ABC weight=C", "input=AB weight=B"),
    "cross_entropy": ("input=AB target=A weight=B", "input=ABC target=AC weight=B"),
    "nll_loss": ("input=AB self=AB target=A weight=B",),
    "embedding": ("weight=AB input=C indices=C", "weight=AB input=CD indices=CD"),
    "gather": ("self=AB index=AB", "self=AB index=CB", "self=AB index=AC",
    "self=A index=C"),
    "take_along_dim": ("self=AB indices=AB", "self=AB indices=CB", "self=AB indices=AC"),
    "index_select": ("self=AB index=C", "self=ABD index=C"),
    "index_add": ("self=AB index=C source=CB", "self=AB index=C source=AC"),
    "index_copy": ("self=AB index=C source=CB", "self=AB index=C source=AC"),
    "index_fill": ("self=AB index=C",),
    "index_put": ("self=AB indices=C values=CB", "self=A indices=C values=C"),
    "scatter": ("self=AB index=AB src=AB", "self=AB index=CB src=CB",
    "self=AB index=AC src=AC"),
    "scatter_add": ("self=AB index=AB src=AB", "self=AB index=CB src=CB"),
    "scatter_reduce": ("self=AB index=AB src=AB", "self=AB index=CB src=CB"),
    "bincount": ("self=A weights=A",),
    "multinomial": ("self=AB", "self=A"),
    "t": ("self=AB", "self=A"),
    "T": ("self=AB",),
    "orthogonal": ("tensor=AB",),
    "binary_cross_entropy": ("self=AB input=AB target=AB weight=B",),
}  # fmt: skip

EQUATIONS = (
    "ab,bc->ac", "ab,ab->a", "ab->ba", "ab->", "ab,b", "abc,acd->abd", "ab,cd->abcd",
    "ab,ab",
    "a,b->ab", "...a,ab->...b", "aab->b", "abc,c->ab", "ab,bc,cd->ad",
)  # fmt: skip

_INTEGER = {
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift",
    "one_hot",
    "bitwise_right_shift", "__and__", "__or__", "__xor__", "__invert__", "__lshift__",
    "__rshift__",
    "__rand__", "__ror__", "__rxor__", "bincount",
}  # fmt: skip
_UNIT = {
    "bernoulli", "multinomial", "binary_cross_entropy", "logit", "erfinv", "acos", "asin",
    "atanh",
}  # fmt: skip
_TEXTS: dict[str, tuple[str, ...]] = {
    "reduction": ("sum", "mean", "none"), "reduce": ("sum", "prod", "mean", "amax", "amin"),
    "rounding_mode": ("floor", "trunc"), "approximate": ("none", "tanh"),
    "mode": ("constant", "reflect", "replicate", "circular", "fan_in", "fan_out"),
    "ord": ("fro", "nuc"), "nonlinearity": ("relu", "leaky_relu"),
}  # fmt: skip
_DTYPES = ("torch.float64", "torch.float32", "torch.int64", "torch.bool")
_KEYWORDS: dict[str, tuple[str, ...]] = {
    "dim": ("dim", "dim", "axis"), "keepdim": ("keepdim", "keepdim", "keepdims"),
    "other": ("other", "other", "x2"), "self": ("input", "input", "x"),
}  # fmt: skip

# What design.md refuses on purpose although it may be right: traits of forms that do not
# count towards the floor of accepted forms.
ON_PURPOSE: dict[str, str] = {
    "tensor as integer": "a tensor in a slot that takes an integer is refused where the "
    "row of the op gives the slot no role",
    "size by position": "a size read from a piece where values depend on position (arange, "
    "slices, narrow, repeat): rank r does not hold the r-th piece of the result",
    "size as value": "a size read from a piece is Partial where it is a value, and many "
    "ops take no Partial",
    "plain size": "a constant whose sizes are plain numbers is Replicate, and a view to "
    "plain sizes that could be read in several ways is refused",
    "rank": "a number of an axis in a slot whose role the row does not give",
    "tensor as number": "a tensor in a slot that takes a number is refused where the row "
    "of the op gives the slot no role",
}


@dataclass
class Form:
    """One line, its operands, and the mesh on which it is tried."""

    op: str
    overload: str
    sizes: dict[str, int]
    line: str = ""
    operands: dict[str, Operand] = field(default_factory=lambda: dict[str, Operand]())
    target: str = ""
    traits: set[str] = field(default_factory=lambda: set[str]())
    rank_axes: set[str] = field(default_factory=lambda: set[str]())

    @property
    def refused_on_purpose(self) -> bool:
        """Whether `ON_PURPOSE` lists a trait of the form; sizes matter where one is cut."""
        every = [t for x in self.operands.values() for t in x.types.values()]
        cut = any(t.letter in "SV" for t in every)
        listed = self.traits & ON_PURPOSE.keys()
        return any(cut or "size" not in trait for trait in listed)

    @property
    def apart(self) -> list[str]:
        """The axes on which the line means something else at each place."""
        axes = {a for x in self.operands.values() for a in varying(x.types)}
        return [axis for axis in self.sizes if axis in axes | self.rank_axes]


def run_line(form: Form) -> object:
    """The value of a line on one device, at the first place of each axis."""
    held = {
        name: next(iter(x.values.values())).clone() for name, x in form.operands.items()
    }
    first = dict.fromkeys(form.sizes, 0)
    mesh = SimpleNamespace(coordinate=first)
    names = {**WORDS, **held, "axis_rank": first.get, "current_mesh": lambda: mesh}
    return eval(form.line, names)


class _Drawing:
    """Draws one form of one signature."""

    def __init__(self, rng: random.Random, signature: Signature) -> None:
        self.rng, self.signature = rng, signature
        self.op = signature.op
        sizes = rng.choices(MESHES, weights=(5, 3, 3))[0]
        self.form = Form(self.op, signature.overload, dict(sizes))
        recipes = SHAPES.get(self.op)
        self.shapes: dict[str, str] = {}
        if recipes:
            pairs = [pair.split("=") for pair in rng.choice(recipes).split()]
            self.shapes = {name: letters for name, letters in pairs}
            letters = "".join(sorted(set("".join(self.shapes.values()))))
        else:
            letters = "ABCD"[: rng.choices((0, 1, 2, 3, 4), weights=(3, 20, 40, 30, 7))[0]]
        self.letters = letters
        self.letter_sizes = {x: size_of_letter(rng, sizes) for x in letters or "A"}
        self.types = Types(rng, sizes, letters)
        self.dtype = rng.choices(
            (torch.float64, torch.int64, torch.float32, torch.bool), weights=(80, 10, 5, 5)
        )[0]
        if self.op in _INTEGER:
            self.dtype = rng.choices((torch.int64, torch.bool), weights=(7, 3))[0]
        self.domain = rng.choice(("", "", "distinct", "unit"))
        if self.op in _UNIT:
            self.domain = "unit"
        if self.op in ("grouped_mm", "_grouped_mm"):
            self.dtype = torch.float32
            aligned = 4 * math.prod(sizes.values())  # torch wants rows of whole 16 bytes
            self.letter_sizes |= {"B": aligned, "D": aligned}
        self.first: Operand | None = None
        self.literal_dim: int | None = None
        self.keys: dict[str, AxisType] = {}

    # Operands

    def operand(
        self, letters: str, dtype: torch.dtype, domain: str = "", index: int | None = None
    ) -> Operand:
        rng, sizes = self.rng, self.form.sizes
        name = "xyzwuvst"[len(self.form.operands) % 8] + "_" * (
            len(self.form.operands) // 8
        )
        shape = [1 if x == "1" else self.letter_sizes[x] for x in letters]
        types = self.types.draw(letters, shape)
        if dtype is torch.bool or (domain.startswith("rows:") and rng.random() < 0.8):
            types = {axis: R if t.letter == "P" else t for axis, t in types.items()}
        if self.op in ("grouped_mm", "_grouped_mm"):
            # Torch reads beyond the rows of a piece where offsets count all rows.
            rows = letters.find("A" if "A" in letters else "C")
            types = {a: R if getattr(t, "dim", -1) == rows else t for a, t in types.items()}
        if self.op == "scaled_dot_product_attention" and letters.endswith("ED"):
            # Torch reads beyond a piece where keys and values differ in number.
            types = self.keys = self.keys or types
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
        made = Operand(name, types, values)
        made.locals = place_value(values, types, sizes, rng)
        if index is not None:
            made.index = Index(index)
        self.form.operands[name] = made
        return made

    def tensor(self, slot: Slot) -> str:
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
        if slot.name in ("weights", "pos_weight"):
            dtype = torch.float64
        made = self.operand(letters, dtype, domain)
        if self.first is None:
            self.first = made
        return made.name

    def constant(self, letters: str) -> str:
        """A tensor made in the line itself, of plain sizes or of sizes of an operand."""
        x = self.sized().name
        shape = [1 if letter == "1" else self.letter_sizes[letter] for letter in letters]
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

    def index(self, slot: Slot) -> str:
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
        domain = rows if rng.random() < 0.75 else None
        return self.operand(letters, torch.int64, f"rows:{rows}", domain).name

    def offsets(self) -> str:
        """Where the groups of a grouped product end: ascending, the last one all rows."""
        made = self.operand("C", torch.int32)
        for where, value in made.values.items():
            ends = sorted(self.rng.randint(0, self.letter_sizes["A"]) for _ in value)
            ends[-1:] = [self.letter_sizes["A"]]
            made.values[where] = torch.tensor(ends, dtype=torch.int32)
        made.locals = place_value(made.values, made.types, self.form.sizes, self.rng)
        return made.name

    def mask(self, slot: Slot) -> str:
        letters = self.letters
        if self.rng.random() < 0.4:
            letters = letters[self.rng.randint(0, len(letters)) :]
        made = self.operand(letters, torch.bool)
        return made.name

    def tensors(self, slot: Slot) -> str:
        count = self.rng.choice((1, 2, 2, 3))
        names: list[str] = []
        for _ in range(count):
            letters = self.letters
            made = self.operand(letters, self.dtype, self.domain)
            self.first = self.first or made
            names.append(made.name)
        if self.rng.random() < 0.1:
            names[-1] = names[0]
        return self.sequence(names)

    def indices(self, slot: Slot) -> str:
        return f"({self.index(slot)},)"

    # Numbers

    def sized(self) -> Operand:
        """An operand to read a size from; a factory has none of its own."""
        made = [x for x in self.form.operands.values() if x.ndim]
        if made:
            return self.rng.choice(made)
        letters = self.letters or "A"
        self.letter_sizes.setdefault("A", 2)
        made_now = self.operand(letters, torch.float64)
        self.first = self.first or made_now
        return made_now

    def read_size(self, dim: int | None = None) -> str:
        """A size read from an operand."""
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
        axis = self.rng.choice(list(self.form.sizes))
        self.form.rank_axes.add(axis)
        self.form.traits.add("rank")
        return self.rng.choice(
            (f"axis_rank({axis!r})", f"current_mesh().coordinate[{axis!r}]")
        )

    def scalar_tensor(self, dtype: torch.dtype, domain: str = "") -> str:
        return self.operand("", dtype, domain).name

    def number(self, slot: Slot) -> str:
        rng = self.rng
        if slot.name in ("p", "dropout_p", "label_smoothing") and self.op != "norm":
            literal = rng.choice(("0.5", "0.0", "1.0", "0.25"))
        elif slot.name in ("eps", "rtol", "atol"):
            literal = rng.choice(("0.5", "1e-05", "0.125"))
        else:
            literal = rng.choice(("2", "3", "0.5", "-1", "1", "0", "True", "1.5"))
        way = rng.choices(
            ("literal", "numpy", "tensor", "size", "rank"), weights=(52, 16, 16, 11, 5)
        )[0]
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
            return self.count_of()
        if way == "rank":
            return self.rank()
        return literal

    def integer(self, literal: int, trait: str = "size by position") -> str:
        rng = self.rng
        way = rng.choices(
            ("literal", "numpy", "tensor", "size", "rank"), weights=(70, 8, 8, 10, 4)
        )[0]
        if way == "numpy":
            return f"np.int64({literal})"
        if way == "tensor":
            self.form.traits.add("tensor as integer")
            made = self.operand("", torch.int64)
            for key in made.values:
                made.values[key] = torch.tensor(
                    literal if rng.random() < 0.7 else rng.randint(0, 2)
                )
            made.locals = place_value(made.values, made.types, self.form.sizes, rng)
            return made.name
        if way == "size":
            self.form.traits.add(trait)
            return self.count_of() if rng.random() < 0.4 else self.read_size()
        if way == "rank":
            return self.rank()
        return str(literal)

    def int_(self, slot: Slot) -> str:
        rng = self.rng
        if slot.name == "split_size_or_sections" and rng.random() < 0.5:
            return self.split_sizes()
        if slot.name == "ignore_index":
            return str(rng.choice((-100, 0, 1)))
        pool = {
            "diagonal": (0, 1, -1, 2), "reduction": (0, 1, 2), "num_classes": (-1, 3, 5, 8),
            "decimals": (0, 1), "minlength": (0, 3, 9), "padding_idx": (0, 1, -1),
            "correction": (0, 1),
        }.get(slot.name, (0, 1, 1, 2, 2, 3, -1))  # fmt: skip
        return self.integer(rng.choice(pool))

    def dim(self, slot: Slot) -> str:
        n = max(self.first.ndim if self.first else len(self.letters), 1)
        literal = self.rng.randrange(-n, n)
        if self.rng.random() < 0.8:
            self.literal_dim = literal % n
            return str(literal)
        way = self.rng.choice(("np", "np", "tensor", "rank", "bool"))
        if way == "np":
            return f"np.int64({literal})"
        if way == "tensor":
            return self.integer(literal)
        return "True" if way == "bool" else self.rank()

    def dims(self, slot: Slot) -> str:
        n = max(self.first.ndim if self.first else len(self.letters), 1)
        one = self.rng.random()
        if one < 0.4:
            return self.dim(slot)
        count = self.rng.randint(0 if one > 0.95 else 1, n)
        if self.op in ("permute", "movedim", "moveaxis"):
            count = n if self.op == "permute" else min(n, 2)
        chosen = [d - self.rng.choice((0, 0, n)) for d in self.rng.sample(range(n), count)]
        return self.sequence([str(d) for d in chosen])

    def sequence(self, items: list[str]) -> str:
        inner = ", ".join(items)
        if self.rng.random() < 0.5:
            return f"[{inner}]"
        return f"({inner},)" if items else "()"

    def repeats(self, slot: Slot) -> str:
        n = max(len(self.letters), 1)
        count = n + self.rng.choice((0, 0, 1))
        return self.sequence(
            [self.integer(self.rng.choice((1, 2, 3))) for _ in range(count)]
        )

    def ints(self, slot: Slot) -> str:
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
        if slot.name == "indices":
            return self.sequence(
                [self.integer(k) for k in rng.choice(((1,), (1, 2), (0, 2)))]
            )
        return self.sequence(
            [self.integer(rng.randint(0, 3)) for _ in range(rng.randint(1, 2))]
        )

    def split_sizes(self) -> str:
        letter = self.rng.choice(self.letters or "A")
        total = self.letter_sizes[letter]
        first = self.rng.randint(0, total)
        return self.sequence([self.integer(first), self.integer(total - first)])

    # Sizes

    def one_size(self, letter: str) -> str:
        """The size of a letter, as a plain number or read from an operand that has it."""
        size = self.letter_sizes[letter]
        if self.rng.random() < 0.5:
            for x in self.form.operands.values():
                shape = next(iter(x.values.values())).shape
                if size in shape:
                    at = list(shape).index(size)
                    return self.rng.choice(
                        (f"{x.name}.shape[{at}]", f"{x.name}.size({at})")
                    )
        self.form.traits.add("plain size")
        return f"np.int64({size})" if self.rng.random() < 0.05 else str(size)

    def size_(self, slot: Slot) -> str:
        rng = self.rng
        letters = list(self.letters)
        if slot.name == "normalized_shape":
            letters = letters[-rng.choice((1, 1, 2)) :]
            if rng.random() < 0.2:
                return f"{self.sized().name}.shape[-{len(letters)}:]"
        if rng.random() < 0.15:
            return f"{self.sized().name}.shape"
        if self.op in ("view", "reshape", "unflatten") and self.first is not None:
            return self.viewed(letters)
        if self.op in ("expand", "broadcast_to"):
            extra = [self.integer(rng.randint(1, 3))] if rng.random() < 0.3 else []
            kept = ["-1" if rng.random() < 0.3 else self.one_size(x) for x in letters]
            return self.sequence([*extra, *kept])
        if slot.name == "stride":
            strides = [1]
            for x in reversed(letters[1:]):
                strides.insert(0, strides[0] * self.letter_sizes[x])
            return self.sequence([str(s) for s in strides[: len(letters)]])
        if not self.form.operands and rng.random() < 0.7:
            self.sized()  # a factory that takes its sizes from an operand
        return self.sequence([self.one_size(x) for x in letters or ["A"]])

    def viewed(self, letters: list[str]) -> str:
        """Dims merged, split, or written as -1."""
        rng = self.rng
        if self.op == "unflatten":
            size = self.letter_sizes[rng.choice(letters or ["A"])]
            parts = [k for k in (1, 2, 3, 4) if size % k == 0]
            k = rng.choice(parts)
            texts = [str(k), str(size // k)]
            texts[rng.randrange(2)] = "-1" if rng.random() < 0.6 else texts[0]
            return self.sequence(texts)
        texts: list[str] = []
        at = 0
        while at < len(letters):
            count = rng.choice((1, 1, 2))
            group = letters[at : at + count]
            at += count
            size = 1
            for x in group:
                size *= self.letter_sizes[x]
            if len(group) == 1 and rng.random() < 0.3 and size > 1:
                k = rng.choice([k for k in (1, 2, 3, 4) if size % k == 0])
                texts += [str(k), str(size // k)]
                self.form.traits.add("plain size")
            elif len(group) == 1:
                texts.append(self.one_size(group[0]))
            else:
                texts.append(" * ".join(self.one_size(x) for x in group))
        if rng.random() < 0.2:
            texts.insert(rng.randint(0, len(texts)), "1")
        if texts and rng.random() < 0.55:
            texts[rng.randrange(len(texts))] = "-1"
        return self.sequence(texts)

    # Others

    def flag(self, slot: Slot) -> str:
        return self.rng.choice(("True", "False", "True", "False", "1"))

    def text(self, slot: Slot) -> str:
        if self.op == "scatter":
            return self.rng.choice(("'add'", "'multiply'"))
        return repr(self.rng.choice(_TEXTS.get(slot.name, ("sum",))))

    def dtype_(self, slot: Slot) -> str:
        if self.op == "type" and self.rng.random() < 0.4:
            return self.rng.choice(
                ("'torch.DoubleTensor'", "torch.LongTensor", "torch.FloatTensor")
            )
        return self.rng.choice(_DTYPES)

    def device(self, slot: Slot) -> str:
        return self.rng.choice(("'cpu'", "torch.device('cpu')"))

    def out(self) -> str:
        """A tensor for `out=`, of the shape that the line has without it, or empty."""
        try:
            made = run_line(self.form)
        except Exception:
            made = None
        if not isinstance(made, torch.Tensor) or self.rng.random() < 0.1:
            self.letter_sizes["Z"] = 0
            return self.operand("Z", self.dtype).name
        letters = ""
        for size in made.shape:
            known = [
                x for x, s in self.letter_sizes.items() if s == size and x not in letters
            ]
            letter = known[0] if known else chr(ord("a") + len(letters))
            self.letter_sizes[letter] = size
            letters += letter
        return self.operand(letters, made.dtype).name

    def stored(self, slot: Slot) -> str:
        return self.number(slot) if self.rng.random() < 0.5 else self.tensor(slot)

    def subscript(self, slot: Slot) -> str:
        rng = self.rng
        n = self.first.ndim if self.first else 1
        items: list[str] = []
        for d in range(rng.randint(0 if n == 0 else 1, max(n, 1))):
            size = self.letter_sizes[self.letters[d]] if d < len(self.letters) else 2
            k = rng.randrange(-size, size)
            way = rng.randrange(16)
            if way < 4:
                items.append(self.piece_of(size))
            elif way < 6:
                items.append(self.integer(k))
            elif way < 7:
                items.append("...")
            elif way < 8:
                items.append("None")
            elif way < 9:
                rows = ", ".join(str(rng.randrange(-size, size)) for _ in range(2))
                items.append(
                    rng.choice(
                        ("[{}]", "({})", "np.array([{}])", "torch.tensor([{}])")
                    ).format(rows)
                )
                if rng.random() < 0.3:
                    items[-1] = f"range({min(size, 2)})"
            elif way < 10:
                items.append(rng.choice(("True", "False", "np.True_")))
            elif way < 12:
                domain = size if rng.random() < 0.7 else None
                letters = rng.choice(("", "A", self.letters[:1], self.letters[:2]))
                self.letter_sizes.setdefault("A", 2)
                items.append(
                    self.operand(letters, torch.int64, f"rows:{size}", domain).name
                )
            elif way < 13:
                items.append(self.operand(self.letters[d : d + 1], torch.bool).name)
            elif way < 14:
                flags = ", ".join(str(rng.random() < 0.5) for _ in range(size))
                items.append(f"[{flags}]")
            else:
                items.append(":")
        if len(items) == 1 and rng.random() < 0.7:
            return items[0]
        joined = ", ".join(items)
        if not items:
            return rng.choice(("()", "...", "None", "True"))
        return f"{joined}," if len(items) == 1 else joined

    def piece_of(self, size: int) -> str:
        rng = self.rng
        start, stop = (
            rng.choice(("", "0", "1", "-1")),
            rng.choice(("", str(size), "1", "2", "-1")),
        )
        if rng.random() < 0.3:
            stop = self.integer(size)
        if rng.random() < 0.15:
            start = self.integer(rng.randint(0, size))
        return f"{start}:{stop}" + rng.choice(("", "", "", ":2", ":1"))

    def equation(self, slot: Slot) -> str:
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

    # The line

    def given(self, slot: Slot) -> str:
        named = f"{slot.kind}_" if slot.kind in ("dtype", "int", "size") else slot.kind
        draw: Callable[[Slot], str] = getattr(self, named)
        # Where a tensor may broadcast, a number may stand, and a tensor for a number.
        if slot.kind in ("tensor", "number", "int", "flag") and not slot.required:
            if self.rng.random() < 0.04:
                return "None"
        return draw(slot)

    def draw(self) -> Form:
        signature, rng = self.signature, self.rng
        slots = [
            slot
            for slot in signature.slots
            if slot.kind != "never" and (slot.required or rng.random() < 0.35)
        ]
        if any(s.kind in ("tensor", "tensors") for s in slots):
            # Operands first, so that dims and sizes can be drawn from them.
            first = next(s for s in slots if s.kind in ("tensor", "tensors"))
            texts = {first.name: self.given(first)}
        else:
            texts: dict[str, str] = {}
        for slot in slots:
            if slot.name not in texts and slot.name != "out":
                texts[slot.name] = self.given(slot)
        if signature.writes == "out":
            self.form.line = self.spelled([s for s in slots if s.name != "out"], texts)
            texts["out"] = self.out()
        if signature.writes and texts.get(signature.writes, "").isidentifier():
            self.form.target = texts[signature.writes]
        self.form.line = self.spelled(slots, texts)
        return self.form

    def spelled(self, slots: list[Slot], texts: Mapping[str, str]) -> str:
        signature, rng = self.signature, self.rng
        if signature.pattern:
            values = [texts[slot.name] for slot in slots]
            line = signature.pattern.format(*values)
            return line
        head = signature.head
        given = list(slots)
        if head.startswith("."):
            head = texts[given[0].name] + head
            given = given[1:]
        by_place: list[str] = []
        # A slot that was left out ends what can be given by position.
        order = {slot.name: k for k, slot in enumerate(signature.slots)}
        start = len(slots) - len(given)
        most = 0
        for k, slot in enumerate(given):
            if slot.keyword_only or order[slot.name] != start + k:
                break
            most = k + 1
        count = rng.choice((most, most, rng.randint(0, most)))
        for k, slot in enumerate(given[:count]):
            text = texts[slot.name]
            last = k == count - 1 == len(given) - 1
            if (
                last
                and slot.kind in ("size", "dims", "repeats")
                and text[0] in "(["
                and rng.random() < 0.5
            ):
                text = text[1:-1].rstrip(",")
            if text:
                by_place.append(text)
        named = [
            f"{rng.choice(_KEYWORDS.get(slot.name, (slot.name,)))}={texts[slot.name]}"
            for slot in given[count:]
        ]
        rng.shuffle(named)
        return f"{head}({', '.join([*by_place, *named])})"


def draw_form(rng: random.Random, op: str) -> Form:
    """One call form of an op; whether it runs on one device is not known yet."""
    ways = signatures(op)
    if not ways:
        raise ValueError(f"torch has no function, method or operator called {op!r}")
    weights = [
        1 if way.head.startswith("torch.ops") or way.writes == "out" else 4 for way in ways
    ]
    return _Drawing(rng, rng.choices(ways, weights=weights)[0]).draw()
