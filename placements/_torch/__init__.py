"""Everything that is used of torch beyond its public API, each use with a probe.

A new torch may change any of it. No other folder uses torch's internals
(`tests/placements/test_torch.py` looks), and all of them import what they need from here.
"""

from placements._torch.bodies import body_of as body_of
from placements._torch.distributed import OBJECT_TO_TENSOR as OBJECT_TO_TENSOR
from placements._torch.distributed import device_mesh_over as device_mesh_over
from placements._torch.distributed import distributed_globals as distributed_globals
from placements._torch.distributed import explicit_redistribution as explicit_redistribution
from placements._torch.distributed import fake_store as fake_store
from placements._torch.distributed import (
    forget_meshes_in_dtensor as forget_meshes_in_dtensor,
)
from placements._torch.distributed import functional as functional
from placements._torch.distributed import groups as groups
from placements._torch.distributed import groups_of as groups_of
from placements._torch.distributed import has_backend as has_backend
from placements._torch.distributed import isolate_threads as isolate_threads
from placements._torch.distributed import on_many_ranks as on_many_ranks
from placements._torch.distributed import set_distributed_globals as set_distributed_globals
from placements._torch.distributed import set_global_rank as set_global_rank
from placements._torch.distributed import timeout_of as timeout_of
from placements._torch.distributed import unregister_groups as unregister_groups
from placements._torch.distributed import world as world
from placements._torch.fsdp import HANDS_THROUGH as HANDS_THROUGH
from placements._torch.fsdp import INSIDE_A_GROUP as INSIDE_A_GROUP
from placements._torch.fsdp import Listener as Listener
from placements._torch.fsdp import ShardedGroup as ShardedGroup
from placements._torch.fsdp import group_class as group_class
from placements._torch.fsdp import hooks_of_ddp as hooks_of_ddp
from placements._torch.fsdp import is_fsdp1 as is_fsdp1
from placements._torch.fsdp import is_sharded as is_sharded
from placements._torch.fsdp import listen_to_groups as listen_to_groups
from placements._torch.fsdp import mesh_for_a_parameter as mesh_for_a_parameter
from placements._torch.fsdp import mesh_info as mesh_info
from placements._torch.fsdp import watch_groups as watch_groups
from placements._torch.interception import REGISTRATION_HOOKS as REGISTRATION_HOOKS
from placements._torch.interception import SCRIPTED as SCRIPTED
from placements._torch.interception import STEP_HOOKS as STEP_HOOKS
from placements._torch.interception import check as check
from placements._torch.interception import is_eager as is_eager
from placements._torch.interception import is_unseen as is_unseen
from placements._torch.interception import mask_makers as mask_makers
from placements._torch.interception import modes as modes
from placements._torch.interception import pop_mode as pop_mode
from placements._torch.interception import push_mode as push_mode
from placements._torch.interception import stance as stance
from placements._torch.interception import unseen as unseen
from placements._torch.interception import without_dispatch_modes as without_dispatch_modes
from placements._torch.modules import PARAMETERS as PARAMETERS
from placements._torch.modules import WatchesItsState as WatchesItsState
from placements._torch.modules import held_by as held_by
from placements._torch.modules import modules_below as modules_below
from placements._torch.modules import registered_in as registered_in
from placements._torch.modules import tensor_in as tensor_in
from placements._torch.modules import (
    when_optimizers_show_state as when_optimizers_show_state,
)
from placements._torch.probes import PARTS as PARTS
from placements._torch.probes import require as require
from placements._torch.schemas import NO_DEFAULT as NO_DEFAULT
from placements._torch.schemas import SlotData as SlotData
from placements._torch.schemas import element_slots as element_slots
from placements._torch.schemas import op_name as op_name
from placements._torch.schemas import schemas_of as schemas_of
from placements._torch.schemas import signatures as signatures
from placements._torch.sharded_tensors import CHUNK_LIST as CHUNK_LIST
from placements._torch.sharded_tensors import SHARD as SHARD
from placements._torch.sharded_tensors import WRITE_ITEMS as WRITE_ITEMS
from placements._torch.sharded_tensors import GlobalView as GlobalView
from placements._torch.sharded_tensors import chunk_list as chunk_list
from placements._torch.sharded_tensors import part_of_dtensor as part_of_dtensor
from placements._torch.sharded_tensors import shard_at as shard_at
from placements._torch.sharded_tensors import write_items as write_items
from placements._torch.supported import TESTED as TESTED
from placements._torch.supported import UnsupportedTorchError as UnsupportedTorchError
from placements._torch.supported import unsupported as unsupported
from placements._torch.tensors import attribute_of_tensors as attribute_of_tensors
from placements._torch.tensors import backward_node as backward_node
from placements._torch.tensors import backward_pass as backward_pass
from placements._torch.tensors import base_of as base_of
from placements._torch.tensors import before_node as before_node
from placements._torch.tensors import bytes_of as bytes_of
from placements._torch.tensors import hooks_of as hooks_of
from placements._torch.tensors import in_backward as in_backward
from placements._torch.tensors import in_transform as in_transform
from placements._torch.tensors import leaf_of as leaf_of
from placements._torch.tensors import leave_out_of_pickles as leave_out_of_pickles
from placements._torch.tensors import memory_of as memory_of
from placements._torch.tensors import on_accumulation as on_accumulation
from placements._torch.tensors import on_gradient as on_gradient
from placements._torch.tensors import pytree as pytree
from placements._torch.tensors import storage_identity as storage_identity
from placements._torch.tensors import version_of as version_of
