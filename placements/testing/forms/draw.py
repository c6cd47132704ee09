"""Draws call forms: a line of Python, the operands in it, and their types.

A form is drawn without a look at the checker. It counts if the line runs on one device.
"""

import random
from collections.abc import Callable, Collection, Mapping

import torch

from placements.testing.forms.form import Form, run_line
from placements.testing.forms.shapes import ASKED_TEXTS, NEEDS, ODD_TOO, TEXTS
from placements.testing.forms.signatures import FormSlot, signatures
from placements.testing.forms.sizes import DrawsSizes

# torch writes them without counting it in their versions.
STATISTICS = ("running_mean", "running_var")
_DTYPES = ("torch.float64", "torch.float32", "torch.int64", "torch.bool")
_KEYWORDS: dict[str, tuple[str, ...]] = {
    "dim": ("dim", "dim", "axis"), "keepdim": ("keepdim", "keepdim", "keepdims"),
    "other": ("other", "other", "x2"), "self": ("input", "input", "x"),
}  # fmt: skip


def _often(slot: FormSlot) -> float:
    """How often a slot is given that has a default; most of these are refused."""
    rare = slot.name in ("size_average", "reduce", "max_norm", "scale_grad_by_freq")
    return 0.05 if rare else 0.35


class _Drawing(DrawsSizes):
    """Draws one form of one signature."""

    def flag(self, slot: FormSlot) -> str:
        if self.is_odd and self.rng.random() < (0.5 if self.is_asked else 0.2):
            return self.own_rank()
        return self.rng.choice(("True", "False", "True", "False", "1"))

    def text(self, slot: FormSlot) -> str:
        if self.op == "scatter":
            return self.rng.choice(("'add'", "'multiply'"))
        usual = TEXTS.get(slot.name, ("sum",))
        own = ASKED_TEXTS.get(f"{self.op} {slot.name}") if self.is_asked else None
        return repr(self.rng.choice(own or usual))

    def dtype_(self, slot: FormSlot) -> str:
        if self.op == "type" and self.rng.random() < 0.4:
            return self.rng.choice(
                ("'torch.DoubleTensor'", "torch.LongTensor", "torch.FloatTensor")
            )
        return self.rng.choice(_DTYPES)

    def device(self, slot: FormSlot) -> str:
        return self.rng.choice(("'cpu'", "torch.device('cpu')"))

    def out(self) -> str:
        """Draw a tensor for `out=`, of the shape that the line has without it, or empty."""
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
                x
                for x, s in self.letter_sizes.items()
                if s == size and x.isalpha() and x not in letters
            ]
            letter = known[0] if known else chr(ord("a") + len(letters))
            self.letter_sizes[letter] = size
            letters += letter
        return self.operand(letters, made.dtype).name

    def stored(self, slot: FormSlot) -> str:
        return self.number(slot) if self.rng.random() < 0.5 else self.tensor(slot)

    def given(self, slot: FormSlot) -> str:
        named = f"{slot.kind}_" if slot.kind in ("dtype", "int", "size") else slot.kind
        if self.is_asked and slot.name == "stride" and "strided" not in self.op:
            named = "ints"  # of a window, and no size of a tensor
        draw: Callable[[FormSlot], str] = getattr(self, named)
        self.is_odd = slot.name == self.about
        if self.is_asked and ODD_TOO.get(f"{self.op} {self.about}") == slot.name:
            self.is_odd = True
        # Where a tensor may broadcast, a number may stand, and a tensor for a number.
        if slot.kind in ("tensor", "number", "int", "flag") and not slot.required:
            if self.rng.random() < 0.04:
                if slot.kind == "flag":
                    self.form.traits.add("None as flag")
                return "None"
        return draw(slot)

    def corrupts(self, slot: FormSlot) -> bool:
        """Return whether memory would be: by max_pool3d with dilation and padding."""
        if not self.op.startswith("max_pool3d"):
            return False
        dilates = self.is_asked and self.about == "dilation"
        return slot.name == ("padding" if dilates else "dilation")

    def draw(self) -> Form:
        signature, rng = self.signature, self.rng

        def often(slot: FormSlot) -> float:
            # What else is odd may be a reason to refuse, and hides what is asked for.
            return _often(slot) * (0.3 if self.is_asked else 1)

        wanted = (
            (self.about, *NEEDS.get(self.about, ())) if self.is_asked else (self.about,)
        )
        slots = [
            slot
            for slot in signature.slots
            if slot.kind != "never"
            and not self.corrupts(slot)
            and (slot.required or slot.name in wanted or rng.random() < often(slot))
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
        if self.is_asked and rng.random() < 0.5:  # else what is drawn claims nothing
            self.form.shared = tuple(x for x in self.form.sizes if rng.random() < 0.6)
        if signature.writes and texts.get(signature.writes, "").isidentifier():
            self.form.target = texts[signature.writes]
        self.form.kept = {texts[name] for name in STATISTICS if name in texts}
        self.form.line = self.spelled(slots, texts)
        return self.form

    def spelled(self, slots: list[FormSlot], texts: Mapping[str, str]) -> str:
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


def draw_form(rng: random.Random, op: str, about: Collection[str] = ()) -> Form:
    """One call form of an op; whether it runs on one device is not known yet.

    `about` are names of one slot: it is always given, and mostly in an odd way. Without
    them a third of the forms is about a slot that is drawn.
    """
    ways = signatures(op)
    if not ways:
        raise ValueError(f"torch has no function, method or operator called {op!r}")
    ways = [w for w in ways if any(s.name in about for s in w.slots)] or ways
    # What is rare elsewhere shows what a slot takes: torch.ops takes a number for a flag.
    rare = 4 if about else 1
    weights = [
        rare if way.head.startswith("torch.ops") or way.writes == "out" else 4
        for way in ways
    ]
    way = rng.choices(ways, weights=weights)[0]
    drawn = [s.name for s in way.slots if s.name in about]
    if not about and way.slots and rng.random() < 0.33:
        drawn = [rng.choice(way.slots).name]
    return _Drawing(rng, way, drawn[0] if drawn else "", bool(about)).draw()
