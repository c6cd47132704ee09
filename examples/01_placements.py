"""What every tensor is across ranks, checked in one process for a mesh of any size."""

import torch
from torch.nn.functional import linear

from placements import (
    P,
    R,
    S,
    all_reduce,
    assert_type,
    set_current_mesh,
    type_of,
    typecheck,
)

with set_current_mesh({"dp": 2, "tp": 4}), typecheck():
    # Local tensors: 2 of 4 sequences, 3 of 12 positions, on every rank.
    x_BLD = assert_type(torch.randn(2, 3, 8), {"dp": S(0), "tp": S(1)})
    w_ED = assert_type(torch.randn(16, 8), {"dp": R, "tp": R})

    scores_BLE = torch.sigmoid(linear(x_BLD, w_ED))
    gates_BLK, ids_BLK = scores_BLE.topk(2, dim=-1)
    print("scores      ", type_of(scores_BLE))

    routed_BLE = torch.zeros_like(scores_BLE).scatter_(-1, ids_BLK, 1.0)
    counts_E = routed_BLE.sum(dim=(0, 1))  # tokens are cut on both axes: pending two sums
    print("local counts", type_of(counts_E))

    for axis in ("tp", "dp"):
        counts_E = all_reduce(counts_E, axis, src=P, dst=R)
    print("counts      ", type_of(counts_E))

    tokens_TD = x_BLD.reshape(-1, 8)  # rows of a batch, cut in blocks
    print("tokens      ", type_of(tokens_TD))
