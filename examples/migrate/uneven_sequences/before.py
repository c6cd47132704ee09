"""Each rank writes its rows into a buffer for all tokens, and the buffers are summed. How
many rows the ranks before it have is computed from the length of the whole. (In DTensor
`from_local` takes a shape and stride for this; without them it multiplies the length of
its own piece by the number of ranks.)"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.functional import pad

from examples.migrate.uneven_sequences.one_device import TOKENS
from placements.testing import device_mesh


def summed(buffer: Tensor) -> Tensor:
    y = DTensor.from_local(buffer, device_mesh(), [Partial()])
    return y.redistribute(placements=[Replicate()]).to_local()


def program(x: Tensor) -> Tensor:
    ranks, rank = device_mesh().size(), device_mesh().get_local_rank("tp")
    sizes = [len(piece) for piece in torch.arange(TOKENS).chunk(ranks)]
    start, end = sum(sizes[:rank]), sum(sizes[rank + 1 :])
    return summed(pad(x.square(), (0, 0, start, end)))
