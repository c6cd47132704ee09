"""What names of a file mean: imports and their aliases, one dotted name for each thing."""

import ast

from spmd_moe.lint.trees import inside

# Another name of a module -> the one that the tables use; the longest fitting is taken.
_SAME = {
    "torch.distributed._tensor": "torch.distributed.tensor",
    "torch.distributed._tensor.api": "torch.distributed.tensor",
    "torch.distributed.tensor.api": "torch.distributed.tensor",
    "torch.distributed.tensor._api": "torch.distributed.tensor",
    "torch.distributed.tensor.placement_types": "torch.distributed.tensor",
    "torch.distributed._tensor.placement_types": "torch.distributed.tensor",
    "torch.distributed._tensor.experimental": "torch.distributed.tensor.experimental",
    "torch.distributed.tensor.experimental._func_map": (
        "torch.distributed.tensor.experimental"
    ),
    "torch.distributed.distributed_c10d": "torch.distributed",
    "torch.distributed._functional_collectives": "funcol",
    "torch.distributed.nn": "torch.distributed.nn.functional",
    "torch.nn.utils.clip_grad": "torch.nn.utils",
    "torch.distributed.checkpoint.state_dict_saver": "torch.distributed.checkpoint",
    "torch.autograd.grad_mode": "torch",
    "deepspeed.comm": "torch.distributed",
    "deepspeed.comm.comm": "torch.distributed",
}


class Imports:
    """The imports of a whole file, wherever they stand in it."""

    def __init__(self, tree: ast.Module) -> None:
        self._means: dict[str, str] = {}
        for node in inside(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    self._means[alias.asname or first] = (
                        alias.name if alias.asname else first
                    )
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    name = alias.asname or alias.name
                    self._means[name] = f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
                self._assigned(node)

    def _assigned(self, node: ast.Assign) -> None:
        """`gather = dist.all_gather` is another name for it too."""
        value = self.name_of(node.value)
        if value.startswith(("torch.distributed.", "funcol.")):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    self._means[target.id] = value

    def name_of(self, node: ast.AST) -> str:
        """Return `torch.distributed.all_reduce` for `dist.all_reduce`; "" if no name.

        A name that is no import is returned as it is written.
        """
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        parts.append(self._means.get(node.id, node.id))
        return _canonical(".".join(reversed(parts)))


def _canonical(name: str) -> str:
    head, tail = name, ""
    while head:
        if head in _SAME and tail:
            found = _SAME[head]
            already = found.startswith(head) and f"{head}.{tail}".startswith(found)
            return name if already else f"{found}.{tail}"
        head, _, last = head.rpartition(".")
        tail = f"{last}.{tail}" if tail else last
    return name
