"""Record what crosses a declared boundary: tensors, types, collectives.

A `Recorder` watches one checked forward and the backward after it. Nothing here knows the
layer: names come from its signatures, types from the checker, bytes from the collectives.
"""

import pkgutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from placements._torch import on_gradient
from placements.checker.mode import Typecheck
from placements.runtime import tags
from placements.runtime.blocks import Block
from placements.runtime.describe import dtype_name
from placements.runtime.ledger import Entry, Ledger, activated, active_ledger
from placements.types.tensor import TensorType
from spmd_moe.checks.origins import origins

ARGUMENT, RESULT, COLLECTIVE, PARAMETER, BUFFER = (
    "argument", "result", "collective", "parameter", "buffer"
)  # fmt: skip
REGION = "region"  # where a tensor arises to which trusted code declares a type


@dataclass
class Crossing:
    """One tensor at the first boundary that it crosses."""

    name: str
    where: str
    role: str
    of_method: bool  # of a class that declares the boundary
    dtype: str
    local_shape: tuple[int, ...]
    type: TensorType
    has_gradient: bool
    forward: list[Entry] = field(default_factory=list[Entry])
    backward: list[Entry] = field(default_factory=list[Entry])
    # The places, among all crossings, of the tensors that it was computed from.
    sources: list[int] = field(default_factory=list[int])

    @property
    def global_shape(self) -> tuple[int, ...] | None:
        """The global shape; None where ranks hold unrelated values, of no global tensor."""
        if any(t.letter == "V" for t in self.type.types):
            return None
        return self.type.global_shape(self.local_shape)

    @property
    def gradient_type(self) -> TensorType | None:
        return self.type.dual() if self.has_gradient else None


class Recorder:
    """An observer of the checker that writes down every tensor once."""

    def __init__(self) -> None:
        self.crossings: list[Crossing] = []
        self.collectives: list[Entry] = []
        # Tensors are kept, so that ids stay theirs.
        self._known: dict[int, tuple[Tensor, Crossing]] = {}
        self._entering = ""  # the name of what enters a collective
        self._sent: list[Entry] = []  # by a collective whose result is not seen yet
        # The same two of each exchange that is under way.
        self._under_way: dict[int, tuple[str, list[Entry]]] = {}
        self._at: Crossing | None = None  # whose gradient backward is about to use

    def crossing(
        self, where: str, name: str | None, x: Tensor, found: TensorType | None
    ) -> None:
        if found is None or where == "reinterpret":  # another name for the same rows
            return
        known = self._known.get(id(x))
        if name is None:  # declared, or about to enter a collective
            self._entering = "" if known is None else known[1].name.removesuffix("()")
            return
        if known is not None:
            if name == "return" and known[1].where == REGION:
                # The function that returns it says more than the block in which it arose.
                known[1].name, known[1].where, known[1].role = _called(where), where, RESULT
                known[1].of_method = _is_of_method(where)
            return
        role = {"return": RESULT, "result": COLLECTIVE}.get(name, ARGUMENT)
        called = {RESULT: _called(where), COLLECTIVE: f"{where}({self._entering})"}
        made = self._add(x, called.get(role, name), where, role, found)
        if role == COLLECTIVE:
            made.forward, self._sent = self._sent, []
            if x.requires_grad:
                on_gradient(x, lambda _: self._backward_reached(made))

    def stamped(self, module: nn.Module, name: str, x: Tensor) -> None:
        found = tags.get(x)
        if found is not None and id(x) not in self._known:
            own = dict(
                module.named_parameters(recurse=False)
            )  # whatever stands in for them
            role = PARAMETER if name in own else BUFFER
            self._add(x, name, type(module).__name__, role, found)

    def backward(self) -> None:
        """Do nothing: `sent` is told what backward sends."""

    def asked(self, question: object, answer: object) -> None:
        """Do nothing: a branch is no tensor."""

    def started(self, pending: object) -> None:
        """Keep what belongs to the result of an exchange until somebody waits for it."""
        self._under_way[id(pending)] = self._entering, self._sent
        self._entering, self._sent = "", []

    def waited(self, pending: object) -> None:
        """Give what was kept to the result, which is seen next."""
        self._entering, self._sent = self._under_way.pop(id(pending), ("", []))

    def sent(self, entry: Entry) -> None:
        """Write down a collective that runs, in forward or in backward."""
        self.collectives.append(entry)
        if not entry.backward:
            self._sent.append(entry)
        elif self._at is not None:
            self._at.backward.append(entry)

    def traced(self) -> list[Crossing]:
        """Return all crossings, each with its sources, once the step is over."""
        tensors = [x for x, _ in self._known.values()]
        for crossing, found in zip(self.crossings, origins(tensors), strict=True):
            crossing.sources = found
        return self.crossings

    def _add(
        self, x: Tensor, name: str, where: str, role: str, found: TensorType
    ) -> Crossing:
        made = Crossing(
            name, where, role, _is_of_method(where), dtype_name(x), tuple(x.shape), found,
            x.requires_grad,
        )  # fmt: skip
        self._known[id(x)] = x, made
        self.crossings.append(made)
        return made

    def _backward_reached(self, crossing: Crossing) -> None:
        self._at = crossing


def _called(where: str) -> str:
    """`route.Router.score` -> `score()`, `route.Router.forward` -> `Router()`."""
    *path, last = where.split(".")
    return f"{path[-1] if path and last == 'forward' else last}()"


def _is_of_method(where: str) -> bool:
    """Return whether the path is `package.module.Class.method`, not a function's."""
    try:
        return isinstance(pkgutil.resolve_name(where.rpartition(".")[0]), type)
    except (ImportError, AttributeError, ValueError):  # a local class, a collective
        return False


class _Record(Ledger):
    """A ledger that tells the recorder too."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(outer=active_ledger())
        self._recorder = recorder

    def add(self, entry: Entry) -> None:
        super().add(entry)
        self._recorder.sent(entry)


def ledger_of(recorder: Recorder) -> Block[Ledger]:
    """Tell the recorder of collectives inside, and of a backward that starts here."""
    return activated(_Record(recorder))


@contextmanager
def checked(recorder: Recorder) -> Generator[None]:
    """Run `typecheck()` with every crossing recorded."""
    mode = Typecheck()
    mode.observer = recorder
    with mode:
        yield
