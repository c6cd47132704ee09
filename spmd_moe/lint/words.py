"""Words of torch and of people: tables of calls, and what names of variables tell."""

import re

DIST = "torch.distributed."
NN = "torch.distributed.nn.functional."
DTENSOR = "torch.distributed.tensor."

# Collectives that autograd does not see, and where their input is: position and keywords.
RAW: dict[str, tuple[int, tuple[str, ...]]] = {
    "all_reduce": (0, ("tensor",)),
    "all_reduce_coalesced": (0, ("tensors",)),
    "reduce": (0, ("tensor",)),
    "broadcast": (0, ("tensor",)),
    "all_gather": (1, ("tensor",)),
    "all_gather_into_tensor": (1, ("input_tensor",)),
    "_all_gather_base": (1, ("input_tensor",)),
    "gather": (0, ("tensor",)),
    "reduce_scatter": (1, ("input_list",)),
    "reduce_scatter_tensor": (1, ("input",)),
    "_reduce_scatter_base": (1, ("input",)),
}
RAW_EXCHANGES: dict[str, tuple[int, tuple[str, ...]]] = {
    "all_to_all": (1, ("input_tensor_list",)),
    "all_to_all_single": (1, ("input",)),
}
# Collectives with a backward that nobody can choose.
FUNCTIONAL = {
    "all_reduce", "all_gather_tensor", "all_gather_single", "reduce_scatter_tensor",
    "reduce_scatter_single", "all_gather_tensor_autograd", "reduce_scatter_tensor_autograd",
}  # fmt: skip
OF_NN = {"all_reduce", "all_gather", "_all_gather_base", "reduce_scatter"}
SUMMING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")

# Functions that compute something with a gradient, so a plain argument probably has one.
COMPUTES = re.compile(
    r"(?:^|\.)(?:linear|matmul|bmm|mm|einsum|softmax|log_softmax|logsumexp|silu|gelu|relu"
    r"|embedding|layer_norm|rms_norm|cross_entropy|nll_loss|mse_loss|_grouped_mm|baddbmm"
    r"|scaled_dot_product_attention|dropout)$"
)
# Methods and functions whose result has no gradient.
WITHOUT_GRADIENT = re.compile(
    r"(?:^|\.)(?:detach|detach_|argmax|argmin|argsort|nonzero|item|tolist|long|int|bool|size"
    r"|numel|dim|stride|data_ptr|bincount|histc|one_hot|arange|randperm|eq|ne|lt|le|gt|ge"
    r"|isnan|isinf|isfinite|any|all|zeros|ones|zeros_like|ones_like|empty|empty_like|full"
    r"|full_like|new_zeros|new_ones|new_empty|new_full|new_tensor|tensor|as_tensor|rand"
    r"|randn|randint|get_rank|get_world_size|get_local_rank|len|int|float|bool|max_memory_\w+"
    r"|get_total_norm|clip_grad_norm_|time|perf_counter|get_group|searchsorted|get_coordinate)$"
)
# Methods that keep what is known of a DTensor.
LIKE_THEIR_TENSOR = re.compile(
    r"(?:^|\.)(?:zeros_like|ones_like|empty_like|full_like|new_zeros|new_ones|new_full"
    r"|new_empty|clone|contiguous|to|float|bfloat16|half|double|view|reshape|softmax|sigmoid"
    r"|bool|masked_fill|detach|squeeze|unsqueeze|view_as|type_as|fill_|zero_|scatter|requires_grad_"
    r"|scatter_|scatter_add|scatter_add_|transpose|permute|flatten|t|cpu|cuda)$"
)
# Helpers of one's own that take the local part of what may be a DTensor.
LOCALS = re.compile(r"(?:^|[._])(?:to_|get_)?local(?:_tensor|_part|_grad)?$")
MEANS = re.compile(r"(?:^|\.)(?:mean|cross_entropy|nll_loss|mse_loss|nanmean)$")

STATES = {
    "state_dict", "get_model_state_dict", "get_optimizer_state_dict", "get_state_dict"
}  # fmt: skip

# What names of variables tell.
RANK = re.compile(
    r"^_?(?:(?:get|my|this|cur|current|local|global|world|dp|tp|ep|pp|sp|cp|dcp|etp|edp"
    r"|tensor|data|model|context|sequence|expert|pipeline|parallel|group|mesh|process|in"
    r"|node|shard|replica|ulysses|seq|and|inter|intra)_)*rank(?:_id)?$"
)
GRADIENTS = re.compile(r"(?:^|_)(?:grads?|gradients?)$")
RANKS = re.compile(
    r"(?:^|_)(?:world_size|n_?ranks|num_ranks|nranks|(?:tp|ep|sp|cp|dp|dcp|edp|etp|tensor"
    r"|data|context|sequence|expert|model|ulysses|group|mesh|process_group|pg)"
    r"(?:_(?:model|data|tensor))?(?:_parallel)?_(?:world_)?(?:size|degree))$"
    r"|^get_\w*world_size$"
)
INTEGERS = re.compile(
    r"(?:^|_)(?:ids?|idx|idxs|ind|inds|index|indices|indexes|offsets?|positions?|pos|labels?"
    r"|targets?|masks?|counts?|count|num|numel|lens?|lengths?|lengthes|sizes?|splits?|shape"
    r"|shapes|seqlens?|flags?|steps?|ranks?|world_size|seed|bool|finished|done|overflow"
    r"|rng|rng_state|order|perm|permutation|map|tokens_per_expert|input_tokens|token_ids|"
    r"bytes|byte_tensor|obj\w*|metadata|header|hash|digest|checksum|status|signal|time|times"
    r"|elapsed|latency|memory|mem|total_norm|grad_norm|cu_seqlens|epoch|iteration|tokens_E"
    r"|num_\w+|is_\w+|has_\w+|n_\w+)$"
)
ROWS = re.compile(
    r"(?:^|_)(?:ids?|idx|ind|inds|index|indices|tokens?|positions?|pos|offsets?|rows|order"
    r"|slots?|labels?)(?:_|$)"
)
COUNTS = re.compile(
    r"tokens?_per_(?:local_)?expert|expert_(?:counts?|load|usage|tokens)|^counts?_E"
    r"|num_tokens_per_\w*expert|tokens_per_\w*expert|^(?:local_)?counts$"
)
EXPERTS_IN_USE = re.compile(
    r"\bep_(?:mesh|group|size|degree|rank|ranks|enabled|params|world_size)\b|expert_parallel"
    r"|expert_model_parallel|expert_data_parallel|[\"']ep[\"']|\bExpertParallel\b"
    r"|\bedp_(?:mesh|group)\b"
)
RANKS_IN_USE = re.compile(
    r"torch\.distributed|from torch import distributed|\bDTensor\b|DeviceMesh|device_mesh"
    r"|deepspeed|get_world_size|fully_shard|\.to_local\(|\.full_tensor\(|expert_bias"
    r"|sequence_parallel|parallel_state"
)
# Functions that run where no gradient is needed, by their names.
NOT_TRAINED = re.compile(
    r"state_dict|(?:^|_)(?:load|save|saving|checkpoint|init|initialize|setup|reset|broadcast"
    r"|sync|log|logging|metrics?|metric|report|eval|evaluate|evaluation|validate|validation"
    r"|generate|generation|generator|inference|decode|predict|prediction|export|convert"
    r"|quantize|step|clip|norm|barrier|check|assert|verify|hash|print|dump|restore|warmup"
    r"|benchmark|profile|shard_param|shard_params|gather_params|offload|prefetch|unshard"
    r"|reshard|consolidate|materialize|update|optim|optimizer|backward)(?:_|$)"
    r"|^__(?!call__)",
)
NOT_TRAINED_THERE = re.compile(
    r"state_?dict|checkpoint|optim|muon|planner|export|convert|calibrat|quantiz|vllm|validation",
    re.I,
)
PARAMETERS = re.compile(r"^(?:p|param|params|parameter|w|weight|v|tensor)$|param$")
FLAGS = {
    "sequence_parallel", "tensor_model_parallel", "allreduce", "is_expert", "is_moe_param",
    "average_gradients_across_tp_domain", "expert_parallel", "expert_model_parallel",
}  # fmt: skip
