"""The state of an optimizer by the names of parameters, so that it fits any mesh.

A tensor of the shape of its parameter is cut as the parameter is. A number is the same on
all ranks. The options of groups, and numbers that are no tensors, are kept as a text.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from placements.parameters.held import Held
from placements.runtime.dtensors import local_part
from placements.types.boxes import global_shape

OPTIMIZER = "optimizer"
_LEFT_OUT = ("params", "param_names")  # of a group: the parameters themselves


class Kept(NamedTuple):
    """A tensor of the optimizer's state, and whether it is cut as its parameter is."""

    key: str
    owner: Held
    tensor: Tensor
    is_cut_alike: bool


class OptimizerState:
    """The state of one optimizer, whose parameters are among those of a module."""

    def __init__(self, call: str, optimizer: Optimizer, held: list[Held]) -> None:
        self.call, self.optimizer = call, optimizer
        by_id: dict[int, Held] = {}
        for one in held:  # a tensor with several names goes by its first one
            by_id.setdefault(id(one.tensor), one)
        self.owners: dict[str, Held] = {}
        self.groups: list[tuple[dict[str, Any], list[str]]] = []
        for group in optimizer.param_groups:
            names: list[str] = []
            for parameter in group["params"]:
                if id(parameter) not in by_id:
                    raise ValueError(
                        f"{call}: the optimizer has a parameter of shape "
                        f"{list(parameter.shape)} that the module does not have; make the "
                        "optimizer after what replaces parameters, such as hold_pieces"
                    )
                owner = by_id[id(parameter)]
                names.append(owner.name)
                self.owners[owner.name] = owner
            self.groups.append((group, names))
        self.made: dict[str, dict[str, Any]] = {}
        self.said: dict[str, Any] = {}

    def tensors(self) -> Iterator[Kept]:
        """Yield the tensors of the state under the keys of a checkpoint."""
        for name, owner in self.owners.items():
            for key, value in self._state(owner).items():
                if isinstance(value, Tensor):
                    yield self._kept(name, owner, key, value)

    def text(self) -> str:
        """Return what is no tensor: options by group, and numbers by parameter."""
        values = {
            name: {
                key: _encoded(f"{self.call}: {key!r} of {name!r}", value)
                for key, value in self._state(owner).items()
                if not isinstance(value, Tensor)
            }
            for name, owner in self.owners.items()
            if self._state(owner)
        }
        groups = [
            {
                "names": names,
                "options": {
                    key: _encoded(f"{self.call}: the option {key!r}", value)
                    for key, value in group.items()
                    if key not in _LEFT_OUT
                },
            }
            for group, names in self.groups
        ]
        kind = type(self.optimizer).__name__
        return json.dumps({"class": kind, "groups": groups, "values": values})

    def prepared(self, saved: Mapping[str, Any], text: str) -> Iterator[Kept]:
        """Yield a tensor for each one of the state that was saved, to be read into.

        ValueError if the checkpoint is of another optimizer, or of other parameters.
        """
        self.said = self._parsed(text)
        for full, stored in saved.items():
            if not full.startswith(f"{OPTIMIZER}."):
                continue
            key, _, name = full.removeprefix(f"{OPTIMIZER}.").partition(".")
            if name not in self.owners or not hasattr(stored, "size"):
                raise ValueError(f"{full!r} is of no parameter of this optimizer")
            yield self._prepared(full, self.owners[name], key, stored)

    def finish(self) -> None:
        """Give the optimizer the state that was read, and the options of its groups."""
        said = self.said
        for name, owner in self.owners.items():
            self.optimizer.state.pop(owner.tensor, None)
            if name in said["values"] or name in self.made:
                values = said["values"].get(name, {})
                numbers = {key: _decoded(value) for key, value in values.items()}
                self.optimizer.state[owner.tensor] = self.made.get(name, {}) | numbers
        options = {
            name: group["options"] for group in said["groups"] for name in group["names"]
        }
        for group, names in self.groups:
            for key, value in options[names[0]].items() if names else ():
                new, old = _decoded(value), group.get(key)
                if isinstance(new, Tensor) and isinstance(old, Tensor):
                    old.copy_(new)  # a schedule may refer to it
                else:
                    group[key] = new

    def _parsed(self, text: Any) -> dict[str, Any]:
        said: Any = json.loads(text)
        kind = type(self.optimizer).__name__
        if said["class"] != kind:
            raise ValueError(
                f"the checkpoint is of the optimizer {said['class']}, but this is {kind}"
            )
        options = {
            name: group["options"] for group in said["groups"] for name in group["names"]
        }
        missing = sorted(self.owners.keys() ^ options.keys())
        if missing:
            raise ValueError(
                f"{missing[0]!r} is a parameter of only one of the optimizer "
                "and the checkpoint's optimizer"
            )
        for _, names in self.groups:
            for name in names[1:]:
                if options[name] != options[names[0]]:
                    raise ValueError(
                        f"{names[0]!r} and {name!r} are in one group of the "
                        "optimizer, but had different options when they were saved"
                    )
        return said

    def _state(self, owner: Held) -> Mapping[Any, Any]:
        return cast(Mapping[Any, Any], self.optimizer.state.get(owner.tensor, {}))

    def _kept(self, name: str, owner: Held, key: Any, value: Tensor) -> Kept:
        if not isinstance(key, str) or "." in key:
            raise ValueError(
                f"{self.call}: the optimizer keeps {key!r} of {name!r}; a name without "
                "dots is needed"
            )
        full = f"{OPTIMIZER}.{key}.{name}"
        ours, theirs = local_part(value)[0], local_part(owner.tensor)[0]
        # What FSDP2 leaves of a parameter on a rank without rows has one dim alone.
        both_empty = ours.numel() == theirs.numel() == 0
        if ours.shape == theirs.shape or (both_empty and value.shape == owner.tensor.shape):
            return Kept(full, owner, value, True)
        if value.dim() == 0 or not _is_cut(owner):
            return Kept(full, owner, ours.detach(), False)
        said = self._of_another_shape(name, key, value.shape, owner)
        raise ValueError(f"{self.call}: {said}")

    def _prepared(self, full: str, owner: Held, key: str, stored: Any) -> Kept:
        size, dtype = tuple(stored.size), stored.properties.dtype
        state, known = self.made.setdefault(owner.name, {}), self._state(owner).get(key)
        whole = global_shape(owner.type, tuple(owner.tensor.shape))
        if size == whole:
            if not _fits(known, owner.tensor.shape, dtype):
                known = torch.zeros_like(owner.tensor, dtype=dtype, requires_grad=False)
            state[key] = known
            return Kept(full, owner, cast(Tensor, known), True)
        if size and _is_cut(owner):
            raise ValueError(self._of_another_shape(owner.name, key, size, owner))
        if not _fits(known, size, dtype):
            known = torch.zeros(size, dtype=dtype, device=self._device(owner, size))
        state[key] = known
        return Kept(full, owner, cast(Tensor, known), False)

    def _device(self, owner: Held, size: tuple[int, ...]) -> torch.device:
        """Numbers are on the CPU, where torch keeps them unless a kernel reads them."""
        here = next(group for group, names in self.groups if owner.name in names)
        in_kernel = here.get("capturable") or here.get("fused")
        return owner.tensor.device if size or in_kernel else torch.device("cpu")

    def _of_another_shape(self, name: str, key: str, shape: Any, owner: Held) -> str:
        return (
            f"{type(self.optimizer).__name__} keeps {key!r} of {name!r} in the shape "
            f"{list(shape)}, not that of the parameter, {list(owner.tensor.shape)}; "
            "the parameter is cut over ranks, and nothing says how this is"
        )


def _is_cut(owner: Held) -> bool:
    """Return whether ranks hold different parts of a parameter."""
    return bool(local_part(owner.tensor)[1]) or any(
        t.letter in "SV" for t in owner.type.values()
    )


def _fits(known: Any, shape: Any, dtype: torch.dtype) -> bool:
    return isinstance(known, Tensor) and known.shape == shape and known.dtype == dtype


def _encoded(what: str, value: Any) -> Any:
    """Return a value of JSON that `_decoded` makes the same value of."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor) and value.dim() == 0:
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        items = [_encoded(what, item) for item in cast(list[Any], value)]
        return items if isinstance(value, list) else {"tuple": items}
    raise ValueError(
        f"{what} is {type(value).__name__}; numbers, texts, and lists of them can be saved"
    )


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    said = cast(dict[str, Any], value)
    if "tuple" in said:
        return tuple(_decoded(item) for item in said["tuple"])
    return torch.tensor(said["tensor"], dtype=getattr(torch, said["dtype"]))
