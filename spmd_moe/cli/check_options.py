"""The options of `spmd-moe check`: which there are, and the layer that they describe."""

import argparse
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from spmd_moe.checks.errors import BadInput
from spmd_moe.checks.presets import PRESETS, Preset
from spmd_moe.checks.trace import Workload
from spmd_moe.cli.degrees import SYNTAX
from spmd_moe.config import MoEConfig

DTYPES = ("bfloat16", "float32", "float64")
LARGEST = 2**50
FIRST = "tiny"  # without --preset

EXAMPLES = """\
examples:
  spmd-moe check                                     a tiny layer in every configuration
  spmd-moe check --mesh dp=2,tp=2,ep=4,sp=on         in the one that these degrees name
  spmd-moe check --preset deepseek-v3                8192 ranks, in this process
  spmd-moe check --preset deepseek-v3 --scale-down   and a small one on simulated ranks
  spmd-moe check --preset qwen3-moe --compare-meshes --ranks 64
  spmd-moe check --experts 64 --top-k 6 --seq 7 --json
  spmd-moe check --html report.html                  a page with diagrams
  spmd-moe check --module mypackage.MyLayer --mesh tp=4

exit codes: 0 all is right, 1 a check failed, 2 the input cannot be used.
docs/check.md says how to read the tables, and what --json prints.
"""

# Option -> the field of MoEConfig that it sets; its type; what it is.
MODEL_OPTIONS: dict[str, tuple[str, Any, str]] = {
    "--dim": ("dim", int, "model dim"),
    "--hidden-dim": ("hidden_dim", int, "hidden units of an expert"),
    "--experts": ("num_experts", int, "experts in all"),
    "--top-k": ("top_k", int, "experts for each token"),
    "--shared-experts": ("num_shared_experts", int, "experts that every token takes"),
    "--score-function": ("score_function", str, "sigmoid or softmax"),
    "--route-scale": ("route_scale", float, "factor on the gates"),
    "--expert-groups": ("num_expert_groups", int, "groups of experts"),
    "--limited-groups": ("num_limited_groups", int, "groups that a token may choose from"),
}
MODEL_SWITCHES: dict[str, tuple[str, str]] = {
    "--route-norm": ("route_norm", "make a token's gates sum to one"),
    "--score-before-experts": ("score_before_experts", "weigh rows before the experts"),
}
FIELDS: dict[str, str] = {
    field: option
    for option, (field, *_) in [*MODEL_OPTIONS.items(), *MODEL_SWITCHES.items()]
}

# What asks for something else than the check of a layer -> options that it cannot use.
WITHOUT: dict[str, tuple[str, ...]] = {
    "--module": (
        *FIELDS.values(), "--preset", "--seq", "--batch", "--dtype", "--scale-down",
        "--all-tables", "--compare-meshes", "--ranks",
    ),
    "--compare-meshes": ("--scale-down", "--all-tables", "--html"),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    model = parser.add_argument_group("the model: a preset, and what differs from it")
    about = "; ".join(f"{name}: {preset.about}" for name, preset in PRESETS.items())
    model.add_argument("--preset", metavar="NAME", help=f"{about}; default: {FIRST}")
    for option, (field, kind, text) in MODEL_OPTIONS.items():
        shown = "NAME" if kind is str else "N"
        model.add_argument(option, dest=field, type=kind, metavar=shown, help=text)
    for option, (field, text) in MODEL_SWITCHES.items():
        model.add_argument(
            option, dest=field, action=argparse.BooleanOptionalAction, help=text
        )
    work = parser.add_argument_group("the mesh and the input")
    work.add_argument(
        "--mesh", metavar="DEGREES",
        help=f"{SYNTAX}; without sp both. Without --mesh: every configuration of the layer",
    )  # fmt: skip
    work.add_argument("--seq", type=int, metavar="N", help="length of a sequence")
    work.add_argument("--batch", type=int, metavar="N", help="sequences on every dp rank")
    work.add_argument("--dtype", choices=DTYPES, help="of weights and activations")
    more = parser.add_argument_group("what to do")
    more.add_argument(
        "--scale-down", action="store_true",
        help="run a layer that is too large as a small one in the same configuration",
    )  # fmt: skip
    more.add_argument(
        "--all-tables", action="store_true",
        help="the table of crossings of every configuration, not of the first alone",
    )  # fmt: skip
    more.add_argument(
        "--compare-meshes", action="store_true",
        help="bytes and memory for every mesh of --ranks, instead of one mesh",
    )  # fmt: skip
    more.add_argument(
        "--ranks", type=int, metavar="N", help="of --compare-meshes; default: the preset's"
    )
    more.add_argument(
        "--module", metavar="PACKAGE.CLASS", help="check a typed module of your own instead"
    )
    more.add_argument(
        "--html", type=Path, metavar="FILE",
        help="write a page with diagrams too, which needs no network",
    )  # fmt: skip
    more.add_argument("--json", action="store_true", help="print a report for programs")


def refuse_unused(args: argparse.Namespace) -> None:
    """Raise BadInput for options that would have no effect."""
    for chosen, others in WITHOUT.items():
        for option in others if _is_given(args, chosen) else ():
            if _is_given(args, option):
                raise BadInput(
                    f"{option} does not go with {chosen}, which has no use for it; leave "
                    "one of them out"
                )
    if args.ranks is not None and not args.compare_meshes:
        raise BadInput("--ranks goes with --compare-meshes; for one mesh give --mesh")


def _is_given(args: argparse.Namespace, option: str) -> bool:
    by_option = {shown: field for field, shown in FIELDS.items()}
    name = by_option.get(option, option.removeprefix("--").replace("-", "_"))
    value = getattr(args, name)
    return value is not None and (value is not False or option in MODEL_SWITCHES)


def model_of(args: argparse.Namespace, preset: Preset) -> MoEConfig:
    given = {field: getattr(args, field) for field in FIELDS}
    with options_named():
        return replace(preset.config, **{f: v for f, v in given.items() if v is not None})


def work_of(args: argparse.Namespace, preset: Preset) -> Workload:
    batch = preset.batch if args.batch is None else args.batch
    seq = preset.seq if args.seq is None else args.seq
    for option, value in (("--batch", batch), ("--seq", seq)):
        if value < 1:
            raise BadInput(f"{option} {value}: give a whole number of at least 1")
    return Workload(batch, seq, torch_dtype(args.dtype or preset.dtype))


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def check_size(config: MoEConfig, work: Workload) -> None:
    """Raise BadInput for tensors that no rank could hold."""
    slots = work.batch * work.seq_len * config.top_k
    wide = max(config.dim, config.hidden_dim, config.num_experts, config.shared_hidden_dim)
    weights = config.dim * config.hidden_dim * config.num_experts
    if max(slots * wide, weights) > LARGEST:
        raise BadInput(
            f"a tensor of this layer has more than {LARGEST} numbers; make --batch, --seq, "
            "--dim, --hidden-dim or --experts smaller"
        )


@contextmanager
def options_named() -> Generator[None]:
    """Turn a ValueError about fields into BadInput about the options that set them."""
    try:
        yield
    except ValueError as error:
        raise BadInput(by_options(str(error))) from None


def by_options(text: str) -> str:
    """`top_k (9) must ...` -> `--top-k (9) must ...`"""
    return re.sub(r"\w+", lambda word: FIELDS.get(word[0], word[0]), text)
