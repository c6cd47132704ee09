"""A router whose gradient nobody sums over tp: refused, mended, and right.

Experts are cut over tp, so each rank multiplies the same scores with its own part of the
expert output. What reaches the gate weight on one rank is that rank's share only.
"""

import torch

from placements import (
    I,
    P,
    PlacementError,
    R,
    S,
    all_reduce,
    assert_type,
    convert,
    set_current_mesh,
    typecheck,
)
from placements.testing import device_mesh, run_ranks


def step(sum_the_gradient: bool) -> tuple[float, float]:
    """One gate weight, one token, hidden units cut over tp=2; (output, gradient)."""
    mesh = device_mesh()
    rank = mesh.get_local_rank("tp")
    with set_current_mesh(mesh), typecheck():
        x = assert_type(torch.ones(1, 1), {"tp": I})
        gate = assert_type(torch.ones(1, 1, requires_grad=True), {"tp": I})
        w_in = assert_type(torch.tensor([[[2.0]], [[3.0]]][rank]), {"tp": S(0)})
        w_out = assert_type(torch.tensor([[[5.0]], [[7.0]]][rank]), {"tp": S(1)})
        score = x @ gate
        if sum_the_gradient:
            score = convert(score, "tp", src=I, dst=R)  # backward: all-reduce
        rows = convert(x, "tp", src=I, dst=R)
        out = (rows @ w_in.T) @ w_out.T  # a contraction over the hidden units: Partial
        y = all_reduce(out * score, "tp", src=P, dst=I)
        y.sum().backward()
        assert gate.grad is not None
        return y.item(), float(gate.grad.detach())


if __name__ == "__main__":
    try:
        run_ranks({"tp": 2}, step, False)
    except Exception as failure:
        cause = failure.__cause__
        assert isinstance(cause, PlacementError)
        print(f"refused:\n{cause}\n")
    for rank, (y, gradient) in enumerate(run_ranks({"tp": 2}, step, True)):
        print(f"rank {rank}: output {y:.0f}, gradient of the gate {gradient:.0f}")
        assert (y, gradient) == (31, 31)
