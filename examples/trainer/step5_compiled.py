"""Step 5: the layer compiled as one graph. Check first, compile afterwards.

Types are checked in eager mode, at the first step; compiled code has no annotations in it.
"""

import step1_plain as plain
import torch
from step1_plain import CONFIG, Model

from placements import assert_type, set_current_mesh, typecheck
from spmd_moe import MoE


def gradients(model: Model) -> dict[str, torch.Tensor]:
    model.zero_grad()
    x_BLD, target_BLD = plain.batch(0)
    (model(x_BLD) - target_BLD).square().mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


if __name__ == "__main__":
    with set_current_mesh({}):
        model = Model(MoE(CONFIG))
        with typecheck():
            x_BLD, _ = plain.batch(0)
            assert_type(x_BLD, model.moe.input_types(plain.SEQ_LEN))
            model(x_BLD)
        expected = gradients(model)
        # "aot_eager" needs no C++ compiler; leave it out for torch's own.
        model.moe.compile(fullgraph=True, backend="aot_eager")
        for name, value in gradients(model).items():
            torch.testing.assert_close(value, expected[name])
    print("compiled as one graph, with the gradients of eager mode")
