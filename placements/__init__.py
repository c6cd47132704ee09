"""What every tensor is across ranks: types per mesh axis, checked while code runs.

`README.md` beside this file is the map. A folder is a layer, and an import goes down:

_torch         what is used of torch beyond its public API, each use with a probe
types          what can be said of a tensor
inference      operand types -> result type; pure, without torch
runtime        state of this thread, attributes on objects, messages
collectives    all_reduce, all_gather, ... as `f(x, axis, src=..., dst=...)`
checker        typecheck()
annotations    types in signatures, on tensors and on modules
parameters     what follows from declared types: gradients, clipping, checkpoints
verification   verify()
testing        ranks without a cluster, laws, comparisons with one device
interop        other checkers as second opinions
"""

from placements._torch import UnsupportedTorchError as UnsupportedTorchError
from placements._torch import WatchesItsState as WatchesItsState
from placements._torch import device_mesh_over as device_mesh_over
from placements._torch import in_backward as in_backward
from placements._torch import in_transform as in_transform
from placements._torch import version_of as version_of
from placements.annotations.boundaries import move_at as move_at
from placements.annotations.declarations import assert_type as assert_type
from placements.annotations.declarations import declare as declare
from placements.annotations.declarations import type_of as type_of
from placements.annotations.on import On as On
from placements.annotations.on import PadRows as PadRows
from placements.annotations.region import region as region
from placements.annotations.typed import typed as typed
from placements.checker.generators import own_generator as own_generator
from placements.checker.lookup import register_op as register_op
from placements.checker.mode import typecheck as typecheck
from placements.checker.numbers import axis_rank as axis_rank
from placements.checker.numbers import global_size as global_size
from placements.checker.padding import pad_rows as pad_rows
from placements.collectives import all_gather as all_gather
from placements.collectives import all_reduce as all_reduce
from placements.collectives import all_to_all as all_to_all
from placements.collectives import all_to_all_start as all_to_all_start
from placements.collectives import convert as convert
from placements.collectives import redistribute as redistribute
from placements.collectives import reduce_scatter as reduce_scatter
from placements.collectives import reinterpret as reinterpret
from placements.collectives.averages import global_mean as global_mean
from placements.collectives.pending import Pending as Pending
from placements.collectives.precision import BackwardOptions as BackwardOptions
from placements.collectives.precision import set_gradient_dtype as set_gradient_dtype
from placements.collectives.presentations import reinterpret_mesh as reinterpret_mesh
from placements.collectives.rows import row_numbers as row_numbers
from placements.collectives.rows import to_global as to_global
from placements.collectives.rows import to_local as to_local
from placements.parameters.checkpoint import global_state_dict as global_state_dict
from placements.parameters.checkpoint import (
    load_global_state_dict as load_global_state_dict,
)
from placements.parameters.clipping import clip_grad_norm_ as clip_grad_norm_
from placements.parameters.fsdp import fully_shard as fully_shard
from placements.parameters.gradients import gradient_axes as gradient_axes
from placements.parameters.gradients import reduce_gradients as reduce_gradients
from placements.parameters.pieces import hold_pieces as hold_pieces
from placements.parameters.sharded import (
    load_sharded_state_dict as load_sharded_state_dict,
)
from placements.parameters.sharded import sharded_state_dict as sharded_state_dict
from placements.parameters.wraps import look_at_wraps
from placements.runtime.errors import BranchWarning as BranchWarning
from placements.runtime.errors import NotWaitedWarning as NotWaitedWarning
from placements.runtime.errors import PlacementError as PlacementError
from placements.runtime.errors import UncheckedWarning as UncheckedWarning
from placements.runtime.ledger import ledger as ledger
from placements.runtime.mesh import current_mesh as current_mesh
from placements.runtime.mesh import set_current_mesh as set_current_mesh
from placements.runtime.state import shared_generator as shared_generator
from placements.runtime.state import unchecked as unchecked
from placements.runtime.tags import declarations as declarations
from placements.runtime.tags import forget_factory as forget_factory
from placements.types.axis import AxisType as AxisType
from placements.types.axis import I as I
from placements.types.axis import Invariant as Invariant
from placements.types.axis import P as P
from placements.types.axis import Partial as Partial
from placements.types.axis import R as R
from placements.types.axis import Replicate as Replicate
from placements.types.axis import S as S
from placements.types.axis import Shard as Shard
from placements.types.axis import TypesLike as TypesLike
from placements.types.axis import V as V
from placements.types.axis import Varying as Varying
from placements.types.axis import dual as dual
from placements.types.extents import Even as Even
from placements.types.extents import Extent as Extent
from placements.types.extents import Folded as Folded
from placements.types.extents import Padded as Padded
from placements.types.extents import Ragged as Ragged
from placements.types.extents import ZigZag as ZigZag
from placements.types.index import Index as Index
from placements.types.meaning import join as join
from placements.types.meaning import split as split
from placements.types.mesh import Mesh as Mesh
from placements.types.mesh import MeshLike as MeshLike
from placements.types.mesh import as_mesh as as_mesh
from placements.types.mesh import optional_axes as optional_axes
from placements.types.text import parse_axis_type as parse_axis_type
from placements.verification.mode import verify as verify
from placements.version import __version__ as __version__

look_at_wraps()
