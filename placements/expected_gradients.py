"""Which parameters must get a gradient in a step, and which did.

A parameter that took part and got none is skipped by the optimizer, so that its state
parts from that of ranks which have one.
"""

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from placements.torch_private import on_accumulation


class ExpectedGradients:
    """The parameters that took part since the last step began."""

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
