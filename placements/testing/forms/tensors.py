"""Draws what stands in slots for tensors."""

import math
import random

import torch

from placements.testing.forms.form import Form
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
from placements.testing.forms.shapes import EQUATIONS, INTEGER, SHAPES, UNIT
from placements.testing.forms.signatures import Signature, Slot
from placements.types.axis import AxisType, R
from placements.types.index import Index

MESHES: tuple[dict[str, int], ...] = ({"a": 2}, {"a": 3}, {"a": 2, "b": 2})


class Tensors:
    """Draws the operands of one form of one signature.

    All its operands share the sizes of their letters, and mostly their cuts.
    """

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
        if self.op in INTEGER:
            self.dtype = rng.choices((torch.int64, torch.bool), weights=(7, 3))[0]
        self.domain = rng.choice(("", "", "distinct", "unit"))
        if self.op in UNIT:
            self.domain = "unit"
        if self.op in ("grouped_mm", "_grouped_mm"):
            self.dtype = torch.float32
            aligned = 4 * math.prod(sizes.values())  # torch wants rows of whole 16 bytes
            self.letter_sizes |= {"B": aligned, "D": aligned}
        self.first: Operand | None = None
        self.literal_dim: int | None = None
        self.keys: dict[str, AxisType] = {}

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

    def sequence(self, items: list[str]) -> str:
        inner = ", ".join(items)
        if self.rng.random() < 0.5:
            return f"[{inner}]"
        return f"({inner},)" if items else "()"

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
