"""Draws what stands in slots for sizes and in subscripts."""

import torch

from placements.testing.forms.numbers import DrawsNumbers
from placements.testing.forms.signatures import FormSlot


class DrawsSizes(DrawsNumbers):
    """Draws sizes and subscripts, besides numbers and operands."""

    def one_size(self, letter: str) -> str:
        """Write the size of a letter, as a number or read from an operand that has it."""
        size = self.letter_sizes[letter]
        if self.rng.random() < 0.5:
            for x in self.form.operands.values():
                shape = next(iter(x.values.values())).shape
                if size in shape:
                    at = list(shape).index(size)
                    if (x.name, at) in self.sizes_read:
                        self.form.traits.add("size twice")
                    self.sizes_read.add((x.name, at))
                    return self.rng.choice(
                        (f"{x.name}.shape[{at}]", f"{x.name}.size({at})")
                    )
        self.form.traits.add("plain size")
        return f"np.int64({size})" if self.rng.random() < 0.05 else str(size)

    def size_(self, slot: FormSlot) -> str:
        rng = self.rng
        letters = list(self.letters)
        if slot.name == "normalized_shape":
            letters = letters[-rng.choice((1, 1, 2)) :]
            if rng.random() < 0.2:
                return f"{self.sized().name}.shape[-{len(letters)}:]"
        if rng.random() < 0.15:
            if slot.name == "stride":
                self.form.traits.add("size as value")
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
        if (self.is_asked or not self.form.operands) and rng.random() < 0.7:
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

    def subscript(self, slot: FormSlot) -> str:
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
                letters = rng.choice(("", "A", self.letters[:1], self.letters[:2]))
                self.letter_sizes.setdefault("A", 2)
                items.append(self.rows_of(letters, size))
            elif way < 13:
                items.append(self.operand(self.letters[d : d + 1], torch.bool).name)
            elif way < 14:
                flags = ", ".join(str(rng.random() < 0.5) for _ in range(size))
                items.append(f"[{flags}]")
            elif way < 15:
                items.append(self.own_rows(d))
            else:
                items.append(":")
        odd = ("(", "range", "np.array", "True", "False", "np.True_")
        if any(item.startswith(odd) for item in items) or items.count("...") > 1:
            self.form.traits.add("unknown subscript")
        if len(items) == 1 and rng.random() < 0.7:
            return items[0]
        joined = ", ".join(items)
        if not items:
            only = rng.choice(("()", "...", "None", "True"))
            if only == "True":
                self.form.traits.add("unknown subscript")
            return only
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
