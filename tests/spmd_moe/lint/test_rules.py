"""Every rule finds the pattern however it is written, and leaves the right code alone."""

import textwrap

import pytest

from spmd_moe.lint.look import look_at_text
from spmd_moe.lint.record import CERTAIN, LIKELY, LOOK, Unread
from spmd_moe.lint.rules import BY_NAME, RULES
from tests.migrate.patterns import NAMES

HEAD = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.distributed.checkpoint as dcp
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
"""


def found(text: str, *, head: str = HEAD, rule: str | None = None) -> list[tuple[str, str]]:
    """Return rules and how sure they are, of one rule or of all."""
    said = look_at_text(head + textwrap.dedent(text), "model.py")
    assert not isinstance(said, Unread), said
    return [(one.rule, one.sure) for one in said if rule in (None, one.rule)]


# rule, how sure, the wrong text
WRONG = [
    ("to-local", LIKELY, """
        def f(x, mesh):
            scores = DTensor.from_local(x, mesh, [Replicate()]).softmax(-1).to_local()
            return scores * 2
     """),
    ("to-local", LOOK, """
        class M(nn.Module):
            def forward(self, x):
                return x.to_local() * 2
     """),
    ("to-local", LIKELY, """
        def f(x, mesh):
            whole = x.redistribute(mesh, [Replicate()])
            rows = whole.to_local()
            return rows @ x
     """),
    ("to-local", LOOK, """
        def f(x):
            return x.redistribute(placements=[Replicate()]).to_local()
     """),
    ("to-local", LIKELY, """
        class M(nn.Module):
            def __init__(self, w, mesh):
                self.w = nn.Parameter(distribute_tensor(w, mesh, [Replicate(), Shard(0)]))
            def forward(self, x):
                w = self.w.to_local()
                return x @ w
     """),
    ("full-tensor", LIKELY, """
        class M(nn.Module):
            def forward(self, x):
                h = self.w(x).full_tensor() * x
                return h
     """),
    ("full-tensor", LOOK, """
        def f(x: DTensor):
            return x.full_tensor()
     """),
    ("from-local", LOOK, "x = DTensor.from_local(y, mesh, [Shard(0)])"),
    ("from-local", LOOK, """
        cut = (Replicate(), Shard(1))
        x = torch.distributed.tensor.DTensor.from_local(y, mesh, cut, run_check=False)
     """),
    ("from-local", LOOK, "x = DTensor.from_local(y, mesh, [Shard(0)], shape=z.shape)"),
    ("local-map", LIKELY, """
        run = local_map(fn, out_placements=[Partial()], in_placements=([Replicate()], [Shard(0)]))
     """),
    ("local-map", LIKELY, """
        @local_map(out_placements=o, in_placements=i, in_grad_placements=g if ep else None)
        def fn(x): ...
     """),
    ("local-map", LOOK, "run = local_map(fn, outs, ins, None)"),
    ("scatter", CERTAIN, """
        def f(x, ids, mesh):
            x = DTensor.from_local(x, mesh, [Shard(0)], shape=s, stride=t)
            y = torch.zeros_like(x).scatter_(1, ids, 1.0)
     """),
    ("scatter", LIKELY, """
        def f(x: DTensor, ids, rows):
            x.index_add_(0, ids, rows)
     """),
    ("scatter", LOOK, """
        def f(x, ids, rows):
            if isinstance(x, DTensor):
                x[ids] = rows
     """),
    ("raw-collective", LIKELY, """
        class Experts(nn.Module):
            def forward(self, x):
                y = self.w2(self.w1(x))
                dist.all_reduce(y)
                return y
     """),
    ("raw-collective", LIKELY, """
        def f(x, w, group):
            y = x @ w
            pieces = [torch.empty_like(y) for _ in range(4)]
            dist.all_gather(pieces, y.contiguous(), group=group)
     """),
    ("raw-collective", CERTAIN, """
        def f(x):
            w = nn.Parameter(x)
            dist.reduce_scatter_tensor(out, w * 2)
     """),
    ("raw-all-to-all", LIKELY, """
        class M(nn.Module):
            def forward(self, x):
                out = torch.empty_like(x)
                dist.all_to_all_single(out, x, recv, send, group=self.ep)
     """),
    ("fixed-backward", LOOK, """
        def f(features):
            return torch.cat(torch.distributed.nn.functional.all_gather(features))
     """),
    ("fixed-backward", LOOK, """
        def f(x, w):
            return funcol.all_reduce(x @ w, "sum", group)
     """),
    ("added-first", LIKELY, """
        def f(x, w, bias):
            y = x @ w + bias
            dist.all_reduce(y)
     """),
    ("added-first", LIKELY, """
        def f(self, x):
            y = F.linear(x, self.w)
            y += self.bias
            return funcol.all_reduce(y, "sum", group)
     """),
    ("divided-bias", LIKELY, "b = self.b2_bias / tp_degree"),
    ("divided-bias", LIKELY, "b = bias_ED.unsqueeze(1) / self.mesh.size()"),
    ("masked-vocabulary", LIKELY, "m = (ids < self.vocab_start) | (ids >= self.vocab_end)"),
    ("masked-vocabulary", LIKELY, """
        def f(ids, rows, mesh):
            first = mesh.get_local_rank("tp") * rows
            return (ids < first) | (ids >= first + rows)
     """),
    ("rank-arithmetic", LIKELY, """
        def f(ids, n):
            return ids + dist.get_rank() * n
     """),
    ("rank-arithmetic", LIKELY, """
        def f(token_ids, n, group):
            me = dist.get_rank(group)
            token_ids += me * n
     """),
    ("rank-arithmetic", LIKELY, """
        def f(ids, tp_rank, n):
            first = tp_rank * n
            return ids - first
     """),
    ("rank-arithmetic", LOOK, """
        def f(x, tp_rank):
            return x.chunk(4)[tp_rank]
     """),
    ("rank-arithmetic", LIKELY, """
        class M(nn.Module):
            def forward(self, x):
                r = self.mesh.get_local_rank()
                return x[:, r * self.n : (r + 1) * self.n]
     """),
    ("even-sizes", LOOK, """
        def f(x, world_size):
            return torch.zeros(world_size * x.shape[0], 8)
     """),
    ("even-sizes", LOOK, """
        def f(x, mesh):
            return x.new_empty((x.size(0) * mesh.size(), 8))
     """),
    ("even-sizes", LOOK, """
        def f(x, y):
            start = dist.get_rank() * x.shape[0]
     """),
    ("early-return", LIKELY, """
        def dispatch(x, group):
            if x.shape[0] == 0:
                return x
            return funcol.all_to_all_single_autograd(x, a, b, group)
     """),
    ("counts", LOOK, "dist.all_reduce(moe.tokens_per_expert_E, group=tp)"),
    ("replaced-buffer", LIKELY, """
        class M(nn.Module):
            def __init__(self):
                self.register_buffer("load", torch.zeros(4))
            def count(self, n):
                self.load = self.load + n
     """),
    ("replaced-buffer", LIKELY, """
        class M(nn.Module):
            def step(self, d):
                self.expert_bias = d + self.expert_bias
     """),
    ("average", LIKELY, "dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)"),
    ("average", LIKELY, """
        def f(p):
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
     """),
    ("average", LIKELY, """
        def f(loss):
            dist.all_reduce(loss, dist.ReduceOp.AVG)
     """),
    ("average", LIKELY, """
        def f(loss, mesh):
            dist.all_reduce(loss)
            return loss / mesh.size()
     """),
    ("average", LIKELY, "x = DTensor.from_local(y, mesh, [Partial('avg')])"),
    ("local-mean", LIKELY, """
        def f(logits, labels):
            loss = F.cross_entropy(logits, labels)
            dist.all_reduce(loss)
     """),
    ("local-mean", LIKELY, """
        def f(x, valid, mesh):
            mean = (x * valid).sum() / valid.sum()
            return DTensor.from_local(mean, mesh, [Partial()])
     """),
    ("reducing-hook", LIKELY, "p.register_hook(lambda g: funcol.all_reduce(g, 'sum', tp))"),
    ("reducing-hook", LIKELY, """
        def add_up(p):
            dist.all_reduce(p.grad)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(add_up)
     """),
    ("reduced-by-hand", LIKELY, """
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad, group=tp)
     """),
    ("reduced-by-hand", LIKELY, "g = local(p.grad)\ndist.all_reduce(g, group=tp)"),
    ("reduced-by-hand", LIKELY, "dist.all_reduce(p.grad.to_local(), group=tp)"),
    ("flag", LIKELY, "x = [p for p in ps if getattr(p, 'sequence_parallel', False)]"),
    ("flag", LIKELY, "setattr(self.weight, 'tensor_model_parallel', True)"),
    ("clip", LIKELY, """
        def step(model, ep_mesh):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        mesh = ep_mesh
     """.replace("def step(model, ep_mesh)", "def step(model)")),
    ("clip", LIKELY, """
        def train(model):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
     """),
    ("clip", LOOK, """
        def step(model):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
     """),
    ("divide-factor", LIKELY, "experts.set_gradient_divide_factor(dp_size)"),
    ("divide-factor", LIKELY, "torch.distributed.fsdp.fully_shard(layer.experts, mesh=m)"),
    ("divide-factor", LIKELY, """
        from torch.distributed.fsdp import fully_shard as shard
        shard(layer, mesh=mesh["edp"])
     """),
    ("save", LIKELY, """
        def save(model):
            torch.save({"model": model.state_dict()}, path)
        use(ep_mesh)
     """),
    ("save", LOOK, """
        def save(model):
            state = model.state_dict()
            torch.save(state, path)
     """),
    ("save", LOOK, """
        use(expert_parallel)
        dcp.save(model.state_dict(), checkpoint_id=path)
     """),
    ("local-names", LIKELY, """
        state = {f"experts.{i}": w for i, w in enumerate(local_experts)}
     """),
    ("local-names", LIKELY, """
        for i in range(self.num_local_experts):
            state[f"layers.{n}.experts.{i}.w1"] = w[i]
     """),
]  # fmt: skip

# rule, a text that is right or that says too little
RIGHT = [
    ("to-local", "def f(x): return x.to_local(grad_placements=[Partial()])"),
    ("to-local", "def f(x): return x.to_local().shape"),
    ("to-local", "def f(x): return x.detach().to_local()"),
    ("to-local", "def f(p): return p.grad.to_local()"),
    ("to-local", "@torch.no_grad()\ndef f(x): return x.to_local() * 2"),
    ("to-local", "def f(x):\n  with torch.no_grad():\n    return x.to_local() * 2"),
    ("to-local", "def f(token_ids): return token_ids.to_local()"),
    ("to-local", "def load_state_dict(x): return x.to_local()"),
    ("to-local", "def f(x, m): return x.redistribute(m, [Shard(0)]).to_local() * 2"),
    ("to-local", """
        class F2(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.to_local() * 2
     """),
    ("to-local", """
        class M(nn.Module):
            def __init__(self, w, v, mesh):
                self.w = nn.Parameter(distribute_tensor(w, mesh, [Shard(0), Shard(1)]))
                self.v, self.u = nn.Parameter(distribute_tensor(v, mesh, [Shard(0)])), 3
            def forward(self, x):
                return x @ self.w.to_local() @ self.v.to_local() * self.u
     """),
    ("full-tensor", "def f(x): return x.full_tensor(grad_placements=[Partial()])"),
    ("full-tensor", "def f(norm): return norm.full_tensor()"),
    ("full-tensor", "def save(x: DTensor): return x.full_tensor()"),
    ("from-local", "DTensor.from_local(y, m, [Shard(0)], shape=z.shape, stride=z.stride())"),
    ("from-local", "DTensor.from_local(y, m, [Replicate(), Partial()])"),
    ("local-map", "local_map(f, out_placements=o, in_placements=i, in_grad_placements=g)"),
    ("local-map", "local_map(f, out_placements=o, in_placements=([Shard(0)], [Shard(1)]))"),
    ("local-map", "import spmd_types as spmd\nspmd.local_map(in_types=i, out_types=o)"),
    ("scatter", "def f(x, ids): return torch.zeros_like(x).scatter_(1, ids, 1.0)"),
    ("scatter", "def f(x: DTensor, i, r): return x.to_local().index_add_(0, i, r)"),
    ("raw-collective", "def f(x, w):\n  y = (x @ w).detach()\n  dist.all_reduce(y)"),
    ("raw-collective", "@torch.inference_mode()\ndef f(x, w):\n  dist.all_reduce(x @ w)"),
    ("raw-collective", "def f(x): dist.all_reduce(x)"),
    ("raw-collective", "def f(x, w): dist.all_reduce((x @ w).argmax(-1))"),
    ("raw-collective", "def f(x, w): dist.all_reduce(x @ w, op=dist.ReduceOp.MAX)"),
    ("raw-collective", """
        class Sum(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, w):
                y = x @ w
                dist.all_reduce(y)
                return y
     """),
    ("raw-collective", """
        class M(nn.Module):
            def forward(self, x, num_tokens, mask):
                dist.all_reduce(num_tokens)
                dist.broadcast(mask, 0)
     """),
    ("raw-all-to-all", """
        class M(nn.Module):
            def forward(self, x, counts):
                dist.all_to_all_single(out, counts, group=self.ep)
                return funcol.all_to_all_single_autograd(x, a, b, self.ep)
     """),
    ("fixed-backward", "def f(x, w): return funcol.all_reduce((x @ w).detach(), 'sum', g)"),
    ("fixed-backward", "def f(x, w): return funcol.all_reduce(x @ w, 'max', group)"),
    ("fixed-backward", "def f(seconds): return funcol.all_reduce(seconds, 'sum', group)"),
    ("added-first", "def f(x, w, bias):\n  y = x @ w\n  dist.all_reduce(y)\n  return y + bias"),
    ("added-first", "def f(x, w, y):\n  z = x @ w + y\n  dist.all_reduce(z)"),
    ("divided-bias", "b = bias / 2"),
    ("masked-vocabulary", "m = (ids < 0) | (ids >= self.vocab_size)"),
    ("rank-arithmetic", "def f(dp_rank, tp_rank): global_rank = dp_rank * 2 + tp_rank"),
    ("rank-arithmetic", "def f(rank): seed = 7 + rank * 3"),
    ("rank-arithmetic", "def f(ids, lora_rank): return ids + lora_rank * 2"),
    ("rank-arithmetic", "def f(names, rank): return names.split(',')[rank]"),
    ("even-sizes", "def f(x, n): return torch.zeros(n * x.shape[0], 8)"),
    ("masked-vocabulary", """
        import spmd_types
        @spmd_types.local_map(out_types={"tp": spmd_types.P})
        def f(ids, tp_rank, n):
            first = tp_rank * n
            return (ids < first) | (ids >= first + n)
     """),
    ("even-sizes", "def f(sizes): return torch.zeros(sum(sizes), 8)"),
    ("early-return", """
        def dispatch(x, group):
            y = funcol.all_to_all_single_autograd(x, a, b, group)
            if y.shape[0] == 0:
                return y
            return experts(y)
     """),
    ("counts", "dist.all_reduce(loss)  # of experts"),
    ("replaced-buffer", """
        class M(nn.Module):
            def __init__(self):
                self.register_buffer("load", torch.zeros(4))
                self.load = self.load + 1
            def count(self, n):
                self.load.add_(n)
                self.total = self.total + n
     """),
    ("average", "def f(seconds):\n  t = torch.tensor(seconds)\n  dist.all_reduce(t, op=dist.ReduceOp.AVG)"),
    ("average", "def f(p):\n  dist.all_reduce(p.grad)\n  p.grad /= total_tokens"),
    ("average", "def f(x, world_size): return x / world_size"),
    ("local-mean", "def f(l, y):\n  s = F.cross_entropy(l, y, reduction='sum')\n  dist.all_reduce(s)"),
    ("local-mean", """
        def f(x, valid, mesh):
            count = valid.sum()
            dist.all_reduce(count)
            mean = (x * valid).sum() / count
            return DTensor.from_local(mean, mesh, [Partial()])
     """),
    ("reducing-hook", "p.register_hook(lambda g: g * 2)"),
    ("reducing-hook", "p.register_hook(imported)"),
    ("reduced-by-hand", "dist.all_reduce(loss)"),
    ("reduced-by-hand", "dist.all_reduce(local(loss))"),
    ("flag", "getattr(config, 'sequence_parallel', False)"),
    ("flag", "getattr(p, 'requires_grad', False)"),
    ("clip", """
        def step(model):
            ep_params = [p for p in model.parameters() if "ep" in p.device_mesh.mesh_dim_names]
            torch.nn.utils.get_total_norm([p.grad for p in ep_params])
     """),
    ("clip", """
        def step(model):
            some = [p.grad for p in model.parameters() if "ep" in p.device_mesh.mesh_dim_names]
            torch.nn.utils.get_total_norm(some)
     """),
    ("clip", "from placements import clip_grad_norm_\nclip_grad_norm_(model, 1.0, meshes=ep_mesh)"),
    ("divide-factor", "experts.set_gradient_divide_factor(1.0)"),
    ("divide-factor", "torch.distributed.fsdp.fully_shard(layer.attention, mesh=m)"),
    ("divide-factor", "import placements\nplacements.fully_shard(model.experts, meshes=m)"),
    ("save", "torch.save(args, path)"),
    ("save", "torch.save(self.scheduler.state_dict(), path)"),
    ("save", "use(ep_mesh)\ndcp.save(sharded_state_dict(model), checkpoint_id=path)"),
    ("save", "dcp.save(model.state_dict(), checkpoint_id=path)"),
    ("local-names", "state = {f'experts.{i}': w for i, w in enumerate(experts)}"),
    ("local-names", "s = {f'experts.{r * n + i}': w for i, w in enumerate(local_experts)}"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "sure", "text"), WRONG)
def test_the_pattern_is_found(rule: str, sure: str, text: str) -> None:
    assert found(text, rule=rule) == [(rule, sure)]


@pytest.mark.parametrize(("rule", "text"), RIGHT)
def test_what_is_right_or_unknown_is_left_alone(rule: str, text: str) -> None:
    assert found(text, rule=rule) == []


@pytest.mark.parametrize("rule", list(BY_NAME))
def test_every_rule_has_both_texts_and_a_page(rule: str) -> None:
    assert rule in {name for name, _, _ in WRONG}
    assert rule in {name for name, _ in RIGHT}
    assert BY_NAME[rule].page in NAMES


def test_every_page_of_the_guide_has_a_rule() -> None:
    assert {rule.page for rule in RULES} == set(NAMES)


USE = """
def f(x, w):
    y = x @ w
    {}(y)
"""


@pytest.mark.parametrize(
    ("imported", "called"),
    [
        ("import torch", "torch.distributed.all_reduce"),
        ("import torch.distributed as dist", "dist.all_reduce"),
        ("from torch import distributed", "distributed.all_reduce"),
        ("from torch import distributed as td", "td.all_reduce"),
        ("from torch.distributed import all_reduce", "all_reduce"),
        ("from torch.distributed import all_reduce as ar", "ar"),
        ("import torch.distributed.distributed_c10d as c10d", "c10d.all_reduce"),
        ("import torch.distributed as dist\nadd = dist.all_reduce", "add"),
        ("import deepspeed.comm as dist", "dist.all_reduce"),
        ("if True:\n    from torch.distributed import all_reduce as ar", "ar"),
    ],
)
def test_a_collective_is_known_by_every_name(imported: str, called: str) -> None:
    assert found(USE.format(called), head=imported) == [("raw-collective", LIKELY)]


@pytest.mark.parametrize(
    ("imported", "called"),
    [
        ("import torch.distributed\nfrom placements import all_reduce", "all_reduce"),
        ("import torch.distributed\nimport spmd_types as dist", "dist.all_reduce"),
        ("from mine import distributed as dist  # torch.distributed", "dist.all_reduce"),
    ],
)
def test_another_function_of_that_name_is_left_alone(imported: str, called: str) -> None:
    assert found(USE.format(called), head=imported) == []


def test_a_name_is_followed_through_branches_and_rebinding() -> None:
    text = """
    def f(x, w, group, flag):
        y = x @ w
        if flag:
            y = y.detach()
            dist.all_reduce(y)
            return y
        dist.all_reduce(y)
        y = y.argmax(-1)
        dist.all_reduce(y)
    """
    said = look_at_text(HEAD + textwrap.dedent(text), "model.py")
    assert not isinstance(said, Unread)
    assert [one.line - HEAD.count("\n") for one in said] == [8]


def test_a_piece_of_a_piece_is_found_once() -> None:
    text = "def f(x, dp_rank, tp_rank): return x.chunk(2, 0)[dp_rank].chunk(2, 1)[tp_rank]"
    assert found(text) == [("rank-arithmetic", LOOK)]
