"""Functions of torch in Python that are made of known ops: each part is judged."""

from typing import Any

from torch.overrides import TorchFunctionMode

from placements._torch import body_of
from placements.checker.refusals import COMPLAINTS, refuse_pieces


class _Again(TorchFunctionMode):
    """The mode of a block, once more: torch leaves a mode while it handles a call."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.mode.__torch_function__(func, types, args, kwargs)


def looked_into(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Run the body of the function inside the mode."""
    try:
        with _Again(mode):
            return body_of(func)(*args, **kwargs)
    except COMPLAINTS as error:
        refuse_pieces(error, func.__name__, (args, kwargs))
        raise
