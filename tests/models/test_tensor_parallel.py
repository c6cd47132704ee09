"""Blocks of `transformers`, unmodified, cut over tp: equal to one device in every gradient."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from placements import (
    AxisType,
    Even,
    Folded,
    I,
    P,
    PlacementError,
    R,
    S,
    TypesLike,
    assert_type,
    declarations,
    hold_pieces,
    join,
    ledger,
    move_at,
    reduce_gradients,
    set_current_mesh,
    split,
    typecheck,
)
from placements.testing import RankFailure, device_mesh, run_ranks
from placements.testing.compare.one_device import check_value, tolerance_of

pytest.importorskip("transformers")

from transformers import LlamaConfig, Qwen3MoeConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeDecoderLayer,
    Qwen3MoeRotaryEmbedding,
)

MESH = {"dp": 2, "tp": 2}
TOKENS, DIM, HIDDEN = 6, 16, 8
STREAMS = pytest.mark.parametrize("stream", [I, S(1)], ids=["whole", "sequence cut"])

Blocks = tuple[nn.Module, nn.Module]
Build = Callable[[], Blocks]


def llama(attention: str) -> Blocks:
    config = LlamaConfig(
        hidden_size=DIM, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2
    )
    config._attn_implementation = attention
    torch.manual_seed(0)
    return LlamaDecoderLayer(config, 0).double(), LlamaRotaryEmbedding(config)


def qwen3_moe(attention: str) -> Blocks:
    """A block whose experts are batched products.

    Its grouped products sort the rows and fill the inverse order at an index; nothing says
    that the whole order was written, so it is each rank's own on tp, too, and refused.
    """
    config = Qwen3MoeConfig(
        hidden_size=DIM, head_dim=4, intermediate_size=24, moe_intermediate_size=HIDDEN,
        num_experts=4, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2,
        norm_topk_prob=True,
    )  # fmt: skip
    config._attn_implementation = attention
    config._experts_implementation = "batched_mm"
    torch.manual_seed(0)
    block = Qwen3MoeDecoderLayer(config, 0).double()
    for parameter in block.parameters():  # the experts come without values
        nn.init.normal_(parameter, std=0.3)
    return block, Qwen3MoeRotaryEmbedding(config)


def cut_over_tp(block: nn.Module, stream: AxisType) -> None:
    """Declare and cut all parameters of a decoder block, and move at its boundaries."""

    def on_tp(t: AxisType) -> TypesLike:
        return {"dp": R, "tp": t}

    types = {
        "self_attn.[qkv]_proj.weight": on_tp(S(0)),
        "self_attn.o_proj.weight": on_tp(S(1)),
        "self_attn.?_norm.weight": on_tp(R),
        "mlp.gate_proj.weight": on_tp(S(0)),
        "mlp.up_proj.weight": on_tp(S(0)),
        "mlp.down_proj.weight": on_tp(S(1)),
        "mlp.gate.weight": on_tp(R),
        # The gate's rows and the other factor's rows lie in one tensor, and each is cut.
        "mlp.experts.gate_up_proj": on_tp(S(1, Folded(2, Even(HIDDEN)))),
        "mlp.experts.down_proj": on_tp(S(2)),
        "*norm.weight": on_tp(I if stream == I else R),
    }
    names = [name for name, _ in block.named_parameters()]
    of_experts = any("experts" in name for name in names)
    unused = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj") if of_experts else (
        "mlp.gate.", "mlp.experts", "self_attn.?_norm")  # fmt: skip
    hold_pieces(block, {k: t for k, t in types.items() if not k.startswith(unused)})
    into, out_of = (stream, R), (P, stream)
    argument = "hidden_states" if of_experts else "x"
    move_at(block.self_attn, "tp", before={"hidden_states": into}, after={0: out_of})
    move_at(block.mlp, "tp", before={argument: into}, after=out_of)


def on_ranks(x: Tensor, build: Build, stream: AxisType) -> tuple[
    Tensor, Tensor, dict[str, tuple[Tensor, TypesLike]], list[str]
]:  # fmt: skip
    block, rotary = build()
    types = {"dp": S(0), "tp": stream}
    with set_current_mesh(device_mesh()):
        cut_over_tp(block, stream)
        hold_pieces(rotary, {"*": {"dp": R, "tp": R}})
        own = split(x, types, MESH)[dist.get_rank()].requires_grad_()
        with typecheck(), ledger() as record:
            assert_type(own, types)
            positions = rotary(own, torch.arange(TOKENS)[None])
            y = block(own, position_embeddings=positions, attention_mask=None)
            (y * y).sum().backward()
        reduce_gradients(block)
    gradients: dict[str, tuple[Tensor, TypesLike]] = {}
    for name, parameter in block.named_parameters():
        owner, _, leaf = name.rpartition(".")
        assert parameter.grad is not None
        gradients[name] = parameter.grad, declarations(block.get_submodule(owner))[leaf]
    sent = [f"{entry.kind}{' backward' * entry.backward}" for entry in record.entries]
    assert own.grad is not None
    return y.detach(), own.grad, gradients, sent


def check_against_one_device(build: Build, stream: AxisType, tolerance: float) -> list[str]:
    """Compare the result and all gradients; return what was sent, forward and backward."""
    torch.manual_seed(3)
    block, rotary = build()
    x = torch.randn(4, TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    ranks = run_ranks(MESH, on_ranks, x.detach(), build, stream)
    positions = rotary(x, torch.arange(TOKENS)[None])
    y = block(x, position_embeddings=positions, attention_mask=None)
    (y * y).sum().backward()
    types = {"dp": S(0), "tp": stream}
    assert x.grad is not None
    result = join([rank[0] for rank in ranks], types, MESH)
    check_value("the result", result, y.detach(), tolerance=tolerance)
    of_x = join([rank[1] for rank in ranks], types, MESH)
    check_value("the gradient of x", of_x, x.grad, tolerance=tolerance)
    for name, parameter in block.named_parameters():
        pieces = [rank[2][name][0] for rank in ranks]
        joined = join(pieces, ranks[0][2][name][1], MESH)
        assert parameter.grad is not None and parameter.grad.abs().max() > 0
        check_value(name, joined, parameter.grad, tolerance=tolerance)
    return ranks[0][3]


@STREAMS
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_llama_block_is_cut_over_tp(attention: str, stream: AxisType) -> None:
    sent = check_against_one_device(lambda: llama(attention), stream, 1e-12)
    if stream == I:
        assert sent == ["all-reduce"] * 2 + ["all-reduce backward"] * 2
    else:
        assert sorted(set(sent)) == [
            "all-gather", "all-gather backward", "reduce-scatter", "reduce-scatter backward",
        ]  # fmt: skip


@STREAMS
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_qwen3_moe_block_is_cut_over_tp(attention: str, stream: AxisType) -> None:
    # The router of this model scores in float32, so its gradients are rounded to that.
    tolerance = tolerance_of(torch.float32)
    check_against_one_device(lambda: qwen3_moe(attention), stream, tolerance)


def forgets(block: nn.Module, module: str, kind: str) -> None:
    """Take one side of the moves at the boundary of a module away."""
    hooks = getattr(block.get_submodule(module), f"_forward_{kind}hooks")
    hooks.pop(max(hooks))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("pre_", "linear at .* is Invariant"),
        ("", r"hidden_states f64\[2, 6, 16\]{dp:S\(0\), tp:P}"),
    ],
    ids=["before", "after"],
)
def test_a_move_that_is_missing_is_refused(kind: str, message: str) -> None:
    def program() -> None:
        block, rotary = llama("eager")
        types = {"dp": S(0), "tp": I}
        with set_current_mesh(device_mesh()):
            cut_over_tp(block, I)
            forgets(block, "mlp", kind)
            hold_pieces(rotary, {"*": {"dp": R, "tp": R}})
            x = torch.randn(2, TOKENS, DIM, dtype=torch.float64)
            with typecheck():
                assert_type(x, types)
                block(x, position_embeddings=rotary(x, torch.arange(TOKENS)[None]))

    with pytest.raises(RankFailure, match=message) as failure:
        run_ranks(MESH, program)
    assert isinstance(failure.value.__cause__, PlacementError)
