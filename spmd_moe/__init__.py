"""A Mixture-of-Experts layer whose every tensor says what it is across ranks.

    route -> dispatch -> experts -> combine        (+ shared experts, added at the end)

`README.md` beside this file says in which order to read the files.
"""

from placements import __version__ as __version__
from spmd_moe.auxiliary import Routed as Routed
from spmd_moe.auxiliary import keep_routings as keep_routings
from spmd_moe.auxiliary import load_balance_loss as load_balance_loss
from spmd_moe.auxiliary import sequence_balance_loss as sequence_balance_loss
from spmd_moe.auxiliary import total_counts as total_counts
from spmd_moe.auxiliary import z_loss as z_loss
from spmd_moe.balance import update_expert_bias as update_expert_bias
from spmd_moe.combine import combine as combine
from spmd_moe.combine import combine_full_length as combine_full_length
from spmd_moe.config import MoEConfig as MoEConfig
from spmd_moe.config import Parallel as Parallel
from spmd_moe.dispatch import LocalDispatcher as LocalDispatcher
from spmd_moe.dispatch_all_to_all import AllToAllDispatcher as AllToAllDispatcher
from spmd_moe.experts import GroupedExperts as GroupedExperts
from spmd_moe.experts import SharedExperts as SharedExperts
from spmd_moe.layer import MoE as MoE
from spmd_moe.reference import reference_moe as reference_moe
from spmd_moe.route import Router as Router
