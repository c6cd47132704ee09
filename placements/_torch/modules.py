"""Modules and optimizers that are asked when torch converts, loads or shows their state."""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ClassVar, Self, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from placements._torch.interception import unseen
from placements._torch.probes import require


class WatchesItsState(nn.Module):
    """A module that is asked when its state is converted or loaded.

    `.bfloat16()`, `.to(...)` and `to_empty` of a module, or of one around it, go through
    `_apply`, and `load_state_dict` goes through `_load_from_state_dict`. torch has no
    public name for either.

    Inside `typecheck()` neither is checked op by op. Types are declared of the module and
    survive it, and before the module was called its tensors have none yet.
    """

    # Names of tensors that are converted with the module but are no buffers of it. What
    # treats all buffers alike, as DDP does when it sends those of rank 0 to all ranks,
    # does not see them.
    unregistered: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        require("modules")

    def converted(self, x: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what a parameter or buffer becomes; `convert` is what torch would do."""
        return convert(x)

    def before_loading(self, state: dict[str, Any], prefix: str) -> None:
        """Look at the names and values that are about to be loaded."""

    def after_loading(self, state: dict[str, Any], prefix: str) -> None:
        """Look at the names and values that have been loaded."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with unseen():
            for name in self.unregistered:
                setattr(self, name, self.converted(getattr(self, name), fn))
            return super()._apply(partial(self.converted, convert=fn), recurse)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        self.before_loading(state_dict, prefix)
        with unseen():
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
            self.after_loading(state_dict, prefix)


def held_by(module: nn.Module, name: str) -> tuple[Tensor | None, Tensor | None]:
    """Return the buffer and the parameter of that name, None where there is none."""
    state = vars(module)
    buffers, parameters = state.get("_buffers", {}), state.get("_parameters", {})
    return buffers.get(name), parameters.get(name)


def registered_in(module: nn.Module) -> dict[str, Any]:
    """Return the parameters, buffers and children of a module by name.

    Reading them as attributes could run code of the module (`__getattr__`).
    """
    state = vars(module)
    registries = [state.get(kind, {}) for kind in ("_modules", "_buffers", "_parameters")]
    return {name: value for registry in registries for name, value in registry.items()}


# Where the dict of a module has its parameters and the modules below it. To read them as
# attributes takes longer, because a module has a `__getattr__`.
PARAMETERS, MODULES = "_parameters", "_modules"


def tensor_in(module: nn.Module, name: str) -> Tensor | None:
    """Return what a module holds under the name of a parameter or a buffer.

    The attribute is asked for only if neither is registered: torch looks for it in Python,
    after Python itself did not find it.
    """
    found = module._parameters.get(name)
    if found is None:
        found = module._buffers.get(name)
    return getattr(module, name) if found is None else found


def modules_below(module: nn.Module) -> list[nn.Module]:
    """Return the module and all modules below it, each once.

    `module.modules()` goes through one generator for each level of the tree.
    """
    found, seen = [module], {module}
    for one in found:
        children = one.__dict__[MODULES]
        if children:
            for child in children.values():
                if child not in seen and child is not None:
                    found.append(child)
                    seen.add(child)
    return found


def when_optimizers_show_state(look: Callable[[Optimizer], None]) -> None:
    """Call `look(optimizer)` before every `state_dict()` of an optimizer, from now on.

    torch has hooks for one optimizer, which somebody would have to know of; who makes an
    optimizer tells nobody.
    """
    original = cast(Any, Optimizer).state_dict
    if getattr(original, "looks", None) is not None:
        return

    @wraps(original)
    def state_dict(self: Optimizer) -> Any:
        look(self)
        return original(self)

    cast(Any, state_dict).looks = look
    cast(Any, Optimizer).state_dict = state_dict
