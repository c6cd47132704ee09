"""`verify()`: type checks plus value checks in a running program, on real process groups.

Types say what should be equal on all ranks, and this mode checks that it is. Nothing is
sent while the program runs, not even in a hook of backward: each rank logs fingerprints of
the values at declared boundaries, and the logs are exchanged and compared once, at the end
of the block or at `check()`. So a claim that is wrong is found even if all types fit.
"""

import weakref
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from placements._torch import on_accumulation, on_gradient, unseen, version_of
from placements.checker.generators import RandomOp
from placements.checker.lookup import KNOWN, Call, resolve
from placements.checker.mode import Typecheck
from placements.collectives.objects import judged
from placements.collectives.pending import Pending
from placements.runtime import tags
from placements.runtime.blocks import Block, Steps, UsedWithWith
from placements.runtime.callsite import located, name_of
from placements.runtime.errors import BranchWarning, NotWaitedWarning, PlacementError
from placements.runtime.fingerprints import Fingerprint, project
from placements.runtime.forgotten import Forgotten
from placements.runtime.ledger import Entry, Ledger, activated, active_ledger
from placements.runtime.mesh import current_mesh
from placements.runtime.state import current
from placements.runtime.unchecked import warn_user, warned_without_a_mesh
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType
from placements.verification.crosscheck import verdict
from placements.verification.logs import (
    COLLECTIVE,
    GRADIENT,
    UNCUT,
    VALUE,
    Claim,
    Event,
    Log,
    MeshKey,
    Question,
    RandomDraw,
    claims_of,
)


def verify(module: nn.Module | None = None, *, rtol: float | None = None) -> "Verifying":
    """Check every op, and values where they cross a declaration: `with verify(): ...`.

    Crossings are `assert_type`, the arguments and results of `@typed` functions, declared
    parameters of modules that are called, regions, collectives, and reduced gradients.
    There, R and I values are equal on all ranks of their axis; in backward so are the
    gradients of I and of P; extents agree with the rows that ranks hold; every parameter
    that took part got a gradient (with `module`, every one of its parameters); all ranks
    ran the same collectives; generators are shared where, and only where, it is said.
    `rtol` is what rounding may do, relative to the norm.

    Communicates: one exchange of logs when the block ends; a block of several steps may
    call `check()`, on every rank, after each.
    Raises PlacementError, the same on all ranks, for the first crossing that lied.

        with verify():
            loss = model(batch)
            loss.backward()
            reduce_gradients(model)
        optimizer.step()
    """
    if not isinstance(cast(Any, module), nn.Module | None):
        raise TypeError(f"verify(module): a torch.nn.Module or None, not {module!r}")
    if rtol is not None and not 0 <= rtol < 1:
        raise ValueError(f"verify(rtol): at least 0 and less than 1, not {rtol!r}")
    return Verifying(module, rtol)


class Verifying(UsedWithWith):
    """The block of `verify()`; what it gives to `as` is its mode.

    Only a block that comes to its end may compare: after an error the other ranks may wait
    elsewhere. So `__exit__` must see its arguments, and is Python. A signal that comes
    before it does anything keeps the block from being left; nothing else holds this object,
    so the block is left when the signal's exception is dropped.
    """

    def __init__(self, module: nn.Module | None, rtol: float | None) -> None:
        self._arguments = module, rtol

    def _recreate_cm(self) -> "Verifying":
        return Verifying(*self._arguments)  # as a decorator: one for each call

    def __enter__(self) -> "Verify":
        self._block = _VerifyBlock(Verify(*self._arguments))
        return self._block.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._block.mode.ends(error)
        self._block.close()


class _VerifyBlock(Block["Verify"]):
    """The steps of a mode, held by the block alone."""

    def __init__(self, mode: "Verify") -> None:
        self.mode = mode

    def steps(self) -> "Steps[Verify]":
        return warned_without_a_mesh("verify()", self.mode.steps())


class Verify(Typecheck):
    """The mode of a `verify()` block; one per rank."""

    def __init__(self, module: nn.Module | None, rtol: float | None) -> None:
        super().__init__()
        self.observer = self
        self._rtol = rtol
        self._module = module
        self._mesh_at_start: Mesh | None = None
        self._ended = False
        self._expected = ExpectedGradients()
        self._keys: dict[Mesh, MeshKey] = {}
        self._start_step()

    def _start_step(self) -> None:
        self._log = Log()
        self._backward_ran = False
        self._calls: Counter[tuple[str, str]] = Counter()
        # position of an event in the log -> what to finish its fingerprint from
        self._pending: dict[int, tuple[Tensor, tuple[int, ...], torch.dtype]] = {}
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, Tensor | None]] = {}
        self._hooks: list[RemovableHandle] = []
        self._under_way: dict[int, weakref.ref[Pending]] = {}
        self._expected.start_step()

    def steps(self) -> "Steps[Verify]":
        self._mesh_at_start = current_mesh()
        self._ended = False
        try:
            with activated(Ledger(outer=active_ledger(), listener=self.note)):
                self._expect_gradients()
                yield from cast("Steps[Verify]", super().steps())
        except GeneratorExit:
            if self._ended:
                self.check()
        finally:
            self._remove_hooks()

    def ends(self, error: BaseException | None) -> None:
        """Note how the block is about to be left: at its end, or by an error."""
        self._ended = error is None
        if error is not None and not isinstance(error, PlacementError):
            # Other ranks may wait in a collective: nothing can be exchanged.
            error.add_note(f"verify: {self._log.last()}")

    def check(self) -> None:
        """Exchange and compare what all ranks logged since the last check.

        Every rank must call it. Raises PlacementError for the first crossing that lied.
        """
        with unseen():
            log = self._finished_log()
        for pending in [of_one() for of_one in self._under_way.values()]:
            if pending is not None:  # else it was dropped, and has told so
                warn_user(f"verify: {pending.not_waited()}", NotWaitedWarning)
        for handle in self._hooks:
            handle.remove()
        self._start_step()
        self._expect_gradients()
        mesh = current_mesh() or self._mesh_at_start
        if mesh is not None and mesh.device_mesh is None:
            return
        try:
            lie, branches = judged(mesh, log, verdict)
        except Exception as error:
            # Another rank is elsewhere: in a collective that this one did not run.
            error.add_note(f"verify: this rank was at the exchange of logs; {log.last()}")
            raise
        if lie is not None:
            raise lie
        for branch in branches:
            warn_user(f"verify: {branch}; types do not follow branches", BranchWarning)

    def crossing(
        self, where: str, name: str | None, x: Tensor, found: TensorType | None
    ) -> None:
        """Log what `x` is claimed to be, and watch for its gradient."""
        if found is None or found.mesh.device_mesh is None:
            return
        letters = {t.letter for t in found.types}
        if letters <= {"V"}:
            return
        site, called = located(where), name or name_of(x) or "x"
        self._calls[site, called] += 1
        call = self._calls[site, called]
        with unseen(), torch.no_grad():
            projected = self._known(x) if letters & set("RI") else None
            if letters & set("RIS"):
                claims = claims_of(found, tuple(x.shape))
                self._add(VALUE, site, call, called, found.mesh, claims, x, projected)
            if x.requires_grad and letters & set("IP") and not self._is_seen(x):
                x_hook = self._gradient_hook(site, call, called, found)
                self._hooks.append(on_gradient(x, x_hook))
            self._seen[id(x)] = weakref.ref(x), version_of(x), projected

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        known = KNOWN.get(func) or resolve(func)
        draws = known.__class__ is Call and known.takes_shared
        if not draws or current.mode is not self:
            return super().__torch_function__(func, types, args, kwargs)
        op = RandomOp.of(args, kwargs or {})
        result = super().__torch_function__(func, types, args, kwargs)
        if op.happened() and op.mesh().device_mesh is not None:
            self._drew(located(known.op.name), op)
        return result

    def _drew(self, where: str, op: RandomOp) -> None:
        self._calls[where, ""] += 1
        assert op.state is not None
        self._log.entries.append(
            RandomDraw(where, self._calls[where, ""], op.name, self._key(op.mesh()),
                 op.letters(), op.shared, op.state)
        )  # fmt: skip

    def stamped(self, module: nn.Module, name: str, x: Tensor) -> None:
        """Log a declared parameter of a module that is called, once a step."""
        if not self._is_seen(x):
            self.crossing(type(module).__name__, name, x, tags.get(x))
        if torch.is_grad_enabled() and self._module is None:
            self._expected.expect(f"{type(module).__name__}.{name}", x)

    def _is_seen(self, x: Tensor) -> bool:
        seen = self._seen.get(id(x))
        return seen is not None and seen[0]() is x and seen[1] == version_of(x)

    def _known(self, x: Tensor) -> Tensor:
        projected = self._seen[id(x)][2] if self._is_seen(x) else None
        return project(x) if projected is None else projected

    def _add(
        self,
        kind: str,
        where: str,
        call: int,
        name: str,
        mesh: Mesh,
        claims: dict[str, Claim],
        x: Tensor,
        projected: Tensor | None,
        cause: str = "",
    ) -> None:
        if projected is not None:
            # Read at the end of the step, so that nobody waits for a device before.
            at = len(self._log.entries)
            self._pending[at] = projected, tuple(x.shape), x.dtype
        key = self._key(mesh)
        self._log.entries.append(Event(kind, where, call, name, key, claims, None, cause))

    def _key(self, mesh: Mesh) -> MeshKey:
        if mesh not in self._keys:
            self._keys[mesh] = MeshKey.of(mesh)
        return self._keys[mesh]

    def _gradient_hook(
        self, where: str, call: int, name: str, found: TensorType
    ) -> Callable[[Tensor], None]:
        causes = {axis: t.letter for axis, t in found.items() if t.letter in "IP"}
        duals = found.dual()

        def log(grad: Tensor) -> None:
            with unseen(), torch.no_grad():
                projected = project(grad)
                for letter in dict.fromkeys(causes.values()):
                    claims = {
                        a: UNCUT[duals[a].letter] for a in causes if causes[a] == letter
                    }
                    self._add(
                        GRADIENT, where, call, name, found.mesh, claims, grad, projected,
                        letter,
                    )  # fmt: skip

        return log

    def _expect_gradients(self) -> None:
        if self._module is not None:
            for name, parameter in self._module.named_parameters():
                self._expected.expect(name, parameter)

    def _finished_log(self) -> Log:
        log = self._log
        if self._pending:
            device = next(iter(self._pending.values()))[0].device
            rows = [p.to(device) for p, _, _ in self._pending.values()]
            numbers: list[list[float]] = cast(Any, torch.stack(rows)).tolist()
            for (at, (_, shape, dtype)), projected in zip(
                self._pending.items(), numbers, strict=True
            ):
                found = Fingerprint.of(shape, dtype, projected, self._rtol)
                event = cast(Event, log.entries[at])
                log.entries[at] = event._replace(fingerprint=found)
        log.backward_ran = self._backward_ran
        log.without_gradient = self._expected.missing()
        return log

    def backward(self) -> None:
        """Note that backward begins: parameters that took part must get a gradient."""
        self._backward_ran = True

    def note(self, entry: Entry) -> None:
        """Log a collective, so that it has its place among the crossings."""
        # In backward the mesh of the forward call may not be current any more.
        known = (current_mesh(), *self._keys, self._mesh_at_start)
        mesh = next((m for m in known if m is not None and entry.axis in m.sizes), None)
        if mesh is None or mesh.device_mesh is None:
            return
        kind = f"{entry.kind}{' (backward)' * entry.backward}"
        claims = {entry.axis: UNCUT["P"]}
        event = Event(COLLECTIVE, entry.caller, 0, kind, self._key(mesh), claims)
        self._log.entries.append(event)

    def asked(self, question: Forgotten, answer: Any) -> None:
        """Log a branch on a number that belongs to an axis."""
        mesh = current_mesh()
        if mesh is not None and mesh.device_mesh is not None:
            self._calls[question.where, question.text] += 1
            call = self._calls[question.where, question.text]
            self._log.entries.append(
                Question(question.where, call, question, self._key(mesh), answer)
            )

    def started(self, pending: Pending) -> None:
        """Watch for an exchange that nobody waits for."""
        self._under_way[id(pending)] = weakref.ref(pending)

    def waited(self, pending: Pending) -> None:
        """Stop watching for an exchange: it was waited for."""
        self._under_way.pop(id(pending), None)

    def _remove_hooks(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        self._expected.stop()


class ExpectedGradients:
    """The parameters that took part since the step began, and which got a gradient."""

    def __init__(self) -> None:
        self._handles: dict[int, RemovableHandle] = {}
        self.start_step()

    def start_step(self) -> None:
        self._expected: dict[int, tuple[str, Tensor]] = {}
        self._got: set[int] = set()

    def expect(self, name: str, parameter: Tensor) -> None:
        if not (parameter.requires_grad and parameter.is_leaf):
            return
        key = id(parameter)
        self._expected.setdefault(key, (name, parameter))
        if key not in self._handles:

            def got(parameter: Tensor) -> None:
                self._got.add(key)

            self._handles[key] = on_accumulation(parameter, got)

    def missing(self) -> list[str]:
        return [name for key, (name, _) in self._expected.items() if key not in self._got]

    def stop(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}
