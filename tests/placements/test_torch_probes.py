"""A torch that lacks something is one clear error, and every probe can fail."""

from typing import Any

import pytest
import torch
import torch._dynamo  # whose stance a block replaces, too
from torch import nn

from placements import _torch, typecheck, verify
from placements._torch import UnsupportedTorchError, probes
from tests.support.blocks import assert_clean, assert_next_block_works
from tests.support.blocks import on_two_ranks as on_two_ranks


def test_a_torch_that_lacks_something_is_one_clear_error(monkeypatch: Any) -> None:
    missing = probes.Use("torch._C._gone", "do things", lambda: torch._C._gone)
    monkeypatch.setitem(probes.PARTS, "checking", (missing, *probes.CHECKING))
    monkeypatch.setattr(probes, "_works", set())
    for make in (typecheck, verify):
        with pytest.raises(UnsupportedTorchError) as caught, make():
            raise AssertionError("entered")
        message = str(caught.value)
        assert f"torch {torch.__version__} is not supported" in message
        assert "torch._C._gone (to do things)" in message and "2.13.0" in message
        assert_clean()
    monkeypatch.undo()
    assert_next_block_works()


PUSH = "_push_on_torch_function_stack"


@pytest.mark.parametrize("owner, name, shown", [
    (probes, "push_mode", PUSH), (probes, "mode_at", PUSH),
    (probes, "count_modes", PUSH), (probes, "pop_mode", PUSH),
    (torch._C, "DisableTorchFunction", "DisableTorchFunction"),
    (torch.autograd.Function, "apply", "Function.apply"),
    (nn.Module, "register_buffer", "register_buffer"),
    (probes, "REGISTRATION_HOOKS", "register_buffer"),
    (torch.distributed.distributed_c10d, "_object_to_tensor", "_object_to_tensor"),
    (torch.distributed.ProcessGroup, "allreduce", "ProcessGroup.allreduce"),
    (torch._C, "_current_graph_task_id", "_current_graph_task_id"),
    (torch._ops, "OpOverload", "OpOverload"),
])  # fmt: skip
def test_every_probe_can_fail(monkeypatch: Any, owner: Any, name: str, shown: str) -> None:
    monkeypatch.setattr(probes, "_works", set())
    if owner is probes:
        monkeypatch.setattr(owner, name, None)
    else:
        monkeypatch.delattr(owner, name)
    with pytest.raises(UnsupportedTorchError) as caught, typecheck():
        raise AssertionError("entered")
    assert shown in str(caught.value)
    monkeypatch.undo()
    assert_next_block_works()


@pytest.mark.parametrize("name", ["lazy_init", "post_backward", "unshard"])
def test_an_fsdp2_without_what_is_asked_of_it_is_named(monkeypatch: Any, name: str) -> None:
    monkeypatch.setattr(probes, "_works", set())
    probes.require("sharding")
    monkeypatch.setattr(probes, "_works", set())
    monkeypatch.delattr(_torch.group_class(), name)
    with pytest.raises(UnsupportedTorchError, match="FSDPParamGroup"):
        probes.require("sharding")
