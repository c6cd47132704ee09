"""Rows: layers of networks, which work in windows, in groups or step by step."""

from functools import partial

from placements.inference.flows import losses, norms, recurrent, windows
from placements.inference.op import Row
from placements.inference.rules import LINEAR, MULTILINEAR, NONLINEAR

_WINDOW = "value input; flag kernel_size stride padding ceil_mode"
_POOL = f"{_WINDOW} output_size"
_LARGEST_OF = f"{_POOL} dilation return_indices"
_CHANNELS = (
    "linear in each of input and weight; the channels are contracted, and a bias is a term"
)
_LARGEST = "the largest of each window"
_MEAN = "the mean of each window"
_WITH_PLACES = "the largest of each window and its place"
_STEPS = (
    "each sample by itself, step after step; dropout between layers by the rules of draws"
)
_LSTM = {"gates": 4, "num_states": 2}
_GRU = {"gates": 3, "num_states": 1}
_RNN = {"gates": 1, "num_states": 1}

ROWS: tuple[Row, ...] = (
    Row("windows", "conv1d conv2d conv3d", MULTILINEAR,
        partial(windows.convolution, out=0),
        "value input weight bias; flag stride padding dilation; choice groups", _CHANNELS),
    Row("windows", "conv_transpose1d conv_transpose2d conv_transpose3d", MULTILINEAR,
        partial(windows.convolution, out=1),
        "value input weight bias; flag stride padding output_padding dilation; "
        "choice groups", _CHANNELS),
    *(Row("windows", f"max_pool{n}d adaptive_max_pool{n}d", NONLINEAR,
          partial(windows.pooled, dims=n), _LARGEST_OF, _LARGEST) for n in (1, 2, 3)),
    Row("windows", "max_pool2d_with_indices", NONLINEAR,
        partial(windows.pooled_with_places, dims=2),
        f"{_WINDOW} dilation return_indices", _WITH_PLACES),
    *(Row("windows", f"adaptive_max_pool{n}d_with_indices", NONLINEAR,
          partial(windows.pooled_with_places, dims=n),
          "value input; flag output_size return_indices", _WITH_PLACES)
      for n in (1, 2, 3)),
    Row("windows", "avg_pool1d adaptive_avg_pool1d", LINEAR,
        partial(windows.pooled, dims=1), f"{_POOL} count_include_pad", _MEAN),
    *(Row("windows", f"avg_pool{n}d adaptive_avg_pool{n}d", LINEAR,
          partial(windows.pooled, dims=n), f"{_POOL} count_include_pad divisor_override",
          _MEAN)
      for n in (2, 3)),
    Row("windows", "interpolate", LINEAR, windows.resized,
        "value input; flag size scale_factor mode align_corners recompute_scale_factor "
        "antialias",
        "weighted means of neighbours"),
    Row("windows", "grid_sample", LINEAR, windows.sampled,
        "value input; control grid; flag mode padding_mode align_corners",
        "linear in what is read; the places must be common to the ranks of a sum"),
    Row("windows", "pixel_shuffle", LINEAR, windows.shuffled,
        "value input; flag upscale_factor",
        "channels become places: the pieces of places grow by that factor"),
    Row("windows", "unfold", LINEAR, windows.unfolded,
        "value input; dim dimension; flag size step kernel_size dilation padding stride",
        "every window by itself"),
    Row("windows", "fold", LINEAR, windows.folded,
        "value input; flag output_size kernel_size dilation padding stride",
        "windows are summed where they overlap"),
    Row("norms and losses", "batch_norm", NONLINEAR,
        partial(norms.with_statistics, kept=1, training=False),
        "value input running_mean running_var weight bias; flag training momentum eps; "
        "unread cudnn_enabled",
        "statistics over batch and places, or given ones; linear in the weight, and a bias "
        "is a term"),
    Row("norms and losses", "instance_norm", NONLINEAR,
        partial(norms.with_statistics, kept=2, training=True),
        "value input running_mean running_var weight bias; flag training/use_input_stats "
        "momentum eps; unread cudnn_enabled",
        "statistics over places, or given ones; linear in the weight, and a bias is a "
        "term"),
    Row("norms and losses", "group_norm", NONLINEAR, norms.group_norm,
        "value input weight bias; flag num_groups eps; unread cudnn_enabled",
        "statistics over groups of channels; linear in the weight, and a bias is a term"),
    Row("norms and losses", "local_response_norm", NONLINEAR, windows.over_channels,
        "value input; flag size alpha beta k",
        "each element by its neighbours among the channels"),
    Row("norms and losses",
        "kl_div poisson_nll_loss hinge_embedding_loss "
        "margin_ranking_loss",
        NONLINEAR, losses.elementwise_loss,
        "value input/input1 input2 target; flag size_average reduce reduction log_target "
        "log_input full eps margin",
        "elementwise, then a sum over all elements"),
    Row("norms and losses", "triplet_margin_loss", NONLINEAR,
        losses.row_loss,
        "value input1/anchor input2/positive negative; flag margin p eps swap "
        "size_average reduce reduction",
        "a number for each row of the last dim, then a sum over rows"),
    Row("norms and losses", "norm_except_dim", NONLINEAR, norms.norm_except,
        "value v; flag pow; dim dim", "a norm of each row"),
    Row("norms and losses", "_weight_norm", NONLINEAR, norms.weight_norm,
        "value v g; dim dim", "a norm of each row; linear in the lengths g",
        needs_memory=True),
    *(Row("recurrent", names, NONLINEAR, partial(recurrent.sequence, **counts),
          "value input data hx params; control batch_sizes; flag has_biases num_layers "
          "dropout train bidirectional batch_first", _STEPS, takes="shared",
          needs_memory=True)
      for names, counts in (("lstm", _LSTM), ("gru", _GRU), ("rnn_tanh rnn_relu", _RNN))),
    *(Row("recurrent", names, NONLINEAR, partial(recurrent.cell, **counts),
          "value input hx w_ih w_hh b_ih b_hh", "each sample by itself, one step",
          needs_memory=True)
      for names, counts in (("lstm_cell", _LSTM), ("gru_cell", _GRU),
                            ("rnn_tanh_cell rnn_relu_cell", _RNN))),
)  # fmt: skip
