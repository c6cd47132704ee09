"""What every tensor is across ranks: types per mesh axis, checked while code runs.

types, index            what can be said of a tensor on one axis, of an integer
runs, extents           which rows of a cut dim each rank holds
meaning                 what a type means: split a global value, join the locals
duals, rules, ops       tables: gradient types; how types combine; every known torch op
flows/                  where the dims of an op's operands go
infer, retype           pure inference, for ops and for transitions
transitions, moves      table of collectives and casts; running them, with their backward
collectives             all_reduce, all_gather, ... as `f(x, axis, src=..., dst=...)`
precision               in which dtype they work, forward and backward apart
propagate, op_lookup    the mode that checks every op; call_inference: one call of it
blocks, checking, state beginning and ending a block as a whole; who is in which (unchecked)
patches                 the list of what is replaced in torch meanwhile, and why; what these
                        do: guards, effects, buffers, ranks_and_sizes
torch_private           all that is used of torch beyond its public API, with probes
numbers                 Python numbers that belong to an axis: ranks_and_sizes
validity, padding       rows of padding: what a type says of them, pad_rules, pad_rows
generators, draws       random state of each rank's own, or shared
declarations, typed     types on tensors and modules; types in signatures
parameters              the declared types of a module's parameters; what follows from them:
                        gradients, clipping, checkpoint; averages over split dims
reductions              what hooks and assignments did to a gradient (leaf_gradients)
verify                  compares values across ranks (logs, fingerprints, crosscheck)
errors, suggest         one exception, one format, fixes that were tried
"""

from placements.annotations import On as On
from placements.annotations import PadRows as PadRows
from placements.averages import global_mean as global_mean
from placements.checkpoint import global_state_dict as global_state_dict
from placements.checkpoint import load_global_state_dict as load_global_state_dict
from placements.clipping import clip_grad_norm_ as clip_grad_norm_
from placements.collectives import all_gather as all_gather
from placements.collectives import all_reduce as all_reduce
from placements.collectives import all_to_all as all_to_all
from placements.collectives import convert as convert
from placements.collectives import redistribute as redistribute
from placements.collectives import reduce_scatter as reduce_scatter
from placements.collectives import reinterpret as reinterpret
from placements.declarations import assert_type as assert_type
from placements.declarations import declare as declare
from placements.declarations import region as region
from placements.declarations import type_of as type_of
from placements.errors import PlacementError as PlacementError
from placements.errors import UncheckedWarning as UncheckedWarning
from placements.extents import Even as Even
from placements.extents import Folded as Folded
from placements.extents import Padded as Padded
from placements.extents import Ragged as Ragged
from placements.extents import ZigZag as ZigZag
from placements.generators import own_generator as own_generator
from placements.gradients import gradient_axes as gradient_axes
from placements.gradients import reduce_gradients as reduce_gradients
from placements.index import Index as Index
from placements.index_maps import to_global as to_global
from placements.index_maps import to_local as to_local
from placements.ledger import ledger as ledger
from placements.meaning import join as join
from placements.meaning import split as split
from placements.mesh import Mesh as Mesh
from placements.mesh import current_mesh as current_mesh
from placements.mesh import optional_axes as optional_axes
from placements.mesh import set_current_mesh as set_current_mesh
from placements.op_lookup import register_op as register_op
from placements.padding import pad_rows as pad_rows
from placements.precision import BackwardOptions as BackwardOptions
from placements.precision import set_gradient_dtype as set_gradient_dtype
from placements.presentations import reinterpret_mesh as reinterpret_mesh
from placements.propagate import typecheck as typecheck
from placements.ranks_and_sizes import axis_rank as axis_rank
from placements.ranks_and_sizes import global_size as global_size
from placements.state import shared_generator as shared_generator
from placements.torch_private import UnsupportedTorchError as UnsupportedTorchError
from placements.typed import typed as typed
from placements.types import I as I
from placements.types import Invariant as Invariant
from placements.types import P as P
from placements.types import Partial as Partial
from placements.types import R as R
from placements.types import Replicate as Replicate
from placements.types import S as S
from placements.types import Shard as Shard
from placements.types import V as V
from placements.types import Varying as Varying
from placements.verify import verify as verify
from placements.version import __version__ as __version__
