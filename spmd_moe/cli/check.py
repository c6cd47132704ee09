"""`spmd-moe check`: is this layer, or this module, right on this mesh?"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from typing import Any

import torch
from rich.console import Console

from placements.testing.failures import RankFailure
from spmd_moe.cli import check_json
from spmd_moe.cli.check_layer import all_configurations, check_layer
from spmd_moe.cli.compare_meshes import (
    LEGEND,
    SHOWN,
    best_first,
    compare,
    feasible,
    table_of,
)
from spmd_moe.cli.degrees import SYNTAX, parse_parallel
from spmd_moe.cli.presets import PRESETS, Preset, preset_of
from spmd_moe.cli.progress import progress
from spmd_moe.cli.refused import STORY, refused_program
from spmd_moe.cli.show_layer import show
from spmd_moe.cli.tables import titled
from spmd_moe.cli.terminal import BadInput
from spmd_moe.cli.trace import Workload
from spmd_moe.config import MoEConfig, Parallel, check_together

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

EXAMPLES = """\
examples:
  spmd-moe check                                     a tiny layer in every configuration
  spmd-moe check --mesh dp=2,tp=2,ep=4,sp=on         in the one that these degrees name
  spmd-moe check --preset deepseek-v3                8192 ranks, in this process
  spmd-moe check --preset deepseek-v3 --scale-down   and a small one on simulated ranks
  spmd-moe check --preset qwen3-moe --compare-meshes --ranks 64
  spmd-moe check --experts 64 --top-k 6 --seq 7 --json
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    model = parser.add_argument_group("the model: a preset, and what differs from it")
    about = "; ".join(f"{name}: {preset.about}" for name, preset in PRESETS.items())
    model.add_argument("--preset", default="tiny", metavar="NAME", help=about)
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
    work.add_argument("--dtype", choices=sorted(DTYPES), help="of weights and activations")
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
    more.add_argument("--ranks", type=int, metavar="N", help="of --compare-meshes")
    more.add_argument(
        "--module", metavar="PACKAGE.CLASS", help="check a typed module of your own instead"
    )
    more.add_argument("--json", action="store_true", help="print a report for programs")


def run(args: argparse.Namespace, console: Console) -> int:
    try:
        if args.module is not None:
            from spmd_moe.cli.check_module import run_module

            return run_module(args.module, args.mesh, console, as_json=args.json)
        if args.ranks is not None and not args.compare_meshes:
            raise BadInput("--ranks goes with --compare-meshes; for one mesh give --mesh")
        preset = preset_of(args.preset)
        config, work = _model(args, preset), _work(args, preset)
        if args.compare_meshes:
            return _compare_meshes(args, console, config, work, preset)
        return _check(args, console, config, work, preset)
    except RankFailure as failure:
        if args.debug:
            raise
        print(failure, file=sys.stderr)
        return 1


def _model(args: argparse.Namespace, preset: Preset) -> MoEConfig:
    fields = [field for field, *_ in (*MODEL_OPTIONS.values(), *MODEL_SWITCHES.values())]
    given = {f: getattr(args, f) for f in fields if getattr(args, f) is not None}
    return replace(preset.config, **given)


def _work(args: argparse.Namespace, preset: Preset) -> Workload:
    batch = preset.batch if args.batch is None else args.batch
    seq = preset.seq if args.seq is None else args.seq
    for option, value in (("--batch", batch), ("--seq", seq)):
        if value < 1:
            raise BadInput(f"{option} {value}: give a whole number of at least 1")
    return Workload(batch, seq, DTYPES[args.dtype or preset.dtype])


def _parallels(
    args: argparse.Namespace, config: MoEConfig, preset: Preset
) -> list[Parallel]:
    if args.mesh is None:
        return all_configurations(config, parse_parallel(preset.mesh))
    degrees = parse_parallel(args.mesh)
    check_together(config, degrees)
    if "sp=" in args.mesh or degrees.tp == 1:
        return [degrees]
    return [replace(degrees, sequence_parallel=sp) for sp in (True, False)]


def _check(
    args: argparse.Namespace,
    console: Console,
    config: MoEConfig,
    work: Workload,
    preset: Preset,
) -> int:
    parallels = _parallels(args, config, preset)
    if not parallels:
        raise BadInput(f"no configuration fits {preset.mesh}; name degrees with --mesh")
    results = check_layer(config, parallels, work, scale_down=args.scale_down)
    passed = all(result.passed for result in results)
    if args.json:
        checks = [check_json.of_check(result.trace, work, result.run) for result in results]
        _print_json("check", passed, model=asdict(config), checks=checks)
        return 0 if passed else 1
    console.print(
        f"{_headline(args.preset, config)}\non every dp rank {_tokens(work)}\n",
        highlight=False,
    )
    show(console, results, results if args.all_tables else results[:1])
    if args.mesh is None:
        passed = _show_refused(console) and passed
    return 0 if passed else 1


def _show_refused(console: Console) -> bool:
    error = refused_program()
    console.print(f"\n{STORY}", highlight=False)
    if error is None:
        console.print("it was accepted, which is wrong", style="bold red")
        return False
    console.print(str(error), style="red", highlight=False, markup=False)
    console.print("\nMore of this kind, published: spmd-moe bugs", highlight=False)
    return True


def _compare_meshes(
    args: argparse.Namespace,
    console: Console,
    config: MoEConfig,
    work: Workload,
    preset: Preset,
) -> int:
    degrees = parse_parallel(args.mesh or preset.mesh)
    ranks = degrees.num_ranks if args.ranks is None else args.ranks
    parallels = feasible(config, ranks, degrees.cp)
    checked = progress(compare(config, parallels, work), "meshes", len(parallels))
    candidates = best_first(checked)
    every = replace(work, batch=work.batch * ranks)
    if args.json:
        meshes = [check_json.of_candidate(one) for one in candidates]
        said = check_json.of_work(every)
        _print_json("meshes", True, model=asdict(config), work=said, meshes=meshes)
        return 0
    console.print(
        f"{_headline(args.preset, config)}\non all ranks together {_tokens(every)}\n",
        highlight=False,
    )
    shown = min(SHOWN, len(candidates))
    cp = f" with cp={degrees.cp}" if degrees.cp > 1 else ""
    title = f"{shown} of {len(candidates)} meshes of {ranks} ranks{cp}, least memory first"
    titled(console, title, table_of(candidates))
    console.print(LEGEND, highlight=False)
    return 0


def _headline(name: str, config: MoEConfig) -> str:
    shared = f", {config.num_shared_experts} shared" if config.num_shared_experts else ""
    return (
        f"{name}: dim {config.dim}, hidden {config.hidden_dim}, "
        f"{config.num_experts} experts ({config.top_k} for each token{shared})"
    )


def _tokens(work: Workload) -> str:
    dtype = str(work.dtype).removeprefix("torch.")
    several = "s" if work.batch > 1 else ""
    return f"{work.batch} sequence{several} of {work.seq_len} tokens, {dtype}"


def _print_json(kind: str, passed: bool, **content: Any) -> None:
    print(json.dumps(check_json.report(kind, passed, **content), indent=2))
