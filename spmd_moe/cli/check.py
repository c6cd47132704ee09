"""`spmd-moe check`: is this layer, or this module, right on this mesh?"""

import argparse
import gc
import sys
from dataclasses import asdict, replace

from rich.console import Console

from placements import PlacementError, UnsupportedTorchError
from spmd_moe.checks.configurations import all_configurations, check_layer
from spmd_moe.checks.errors import BadInput
from spmd_moe.checks.meshes import best_first, compare, feasible
from spmd_moe.checks.presets import Preset, preset_of
from spmd_moe.checks.refused import STORY, refused_program
from spmd_moe.checks.trace import Workload
from spmd_moe.cli import check_json
from spmd_moe.cli.check_options import (
    FIRST,
    add_arguments,
    by_options,
    check_size,
    model_of,
    options_named,
    refuse_unused,
    work_of,
)
from spmd_moe.cli.check_report import (
    MESHES_LEGEND,
    MESHES_SHOWN,
    show_candidates,
    show_layer,
)
from spmd_moe.cli.degrees import parse_degrees, parse_parallel
from spmd_moe.cli.html.page import layer_page
from spmd_moe.cli.html.write import check_page, write_page
from spmd_moe.cli.tables import say
from spmd_moe.cli.terminal import failure_of, progress
from spmd_moe.config import MoEConfig, Parallel, check_together

ACCEPTED = "it was accepted, which is wrong"

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace, console: Console) -> int:
    gc.freeze()  # what the imports made stays: not to be searched again and again
    refuse_unused(args)
    if args.html is not None:
        check_page(args.html)
    if args.module is not None:
        from spmd_moe.cli.check_module import run_module  # needs the simulator

        return run_module(args, console)
    name = args.preset or FIRST
    preset = preset_of(name)
    config, work = model_of(args, preset), work_of(args, preset)
    check_size(config, work)
    try:
        if args.compare_meshes:
            return _compare_meshes(args, console, config, work, preset)
        return _check(args, console, config, work, preset)
    except (BadInput, OSError, UnsupportedTorchError):
        raise
    except Exception as error:
        if args.debug:
            raise
        text, code = failure_of(error)
        model = asdict(config)
        if args.html is not None:
            headline = _headline(args.preset or FIRST, config)
            write_page(args.html, layer_page(headline, _every(work), [], failure=text))
        if not args.json:
            print(text, file=sys.stderr)
        elif args.compare_meshes:
            check_json.print_report("meshes", False, failure=text, model=model, meshes=[])
        else:
            check_json.print_report("check", False, failure=text, model=model, checks=[])
        return code


def _parallels(
    args: argparse.Namespace, config: MoEConfig, preset: Preset
) -> tuple[list[Parallel], dict[str, str]]:
    """Return what to check, and why the other configurations cannot be checked."""
    if args.mesh is None:
        every = all_configurations(config, parse_parallel(preset.mesh))
        left_out = {name: by_options(reason) for name, reason in every.left_out.items()}
        if not every.found:
            raise BadInput(
                f"on {preset.mesh}: {'; '.join(_because(left_out))}; give --mesh"
            )
        return list(every.found.values()), left_out
    degrees, says_sp = parse_degrees(args.mesh)
    with options_named():
        check_together(config, degrees)
    if says_sp or degrees.tp == 1:
        return [degrees], {}
    return [replace(degrees, sequence_parallel=sp) for sp in (True, False)], {}


def _because(left_out: dict[str, str]) -> list[str]:
    """Return a line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        by_reason.setdefault(reason, []).append(name)
    return [f"{', '.join(names)} left out: {why}" for why, names in by_reason.items()]


def _check(
    args: argparse.Namespace,
    console: Console,
    config: MoEConfig,
    work: Workload,
    preset: Preset,
) -> int:
    parallels, left_out = _parallels(args, config, preset)
    with progress(parallels, "checking", len(parallels)) as shown:
        results = check_layer(config, shown, work, scale_down=args.scale_down)
    passed = all(result.passed for result in results)
    headline, because = _headline(args.preset or FIRST, config), _because(left_out)
    refused = refused_program() if args.mesh is None else None
    if args.html is not None:
        said = None if args.mesh is not None else str(refused or ACCEPTED)
        page = layer_page(headline, _every(work), results, left_out=because, refused=said)
        write_page(args.html, page)
    if args.json:
        checks = [check_json.of_check(result, work) for result in results]
        check_json.print_report(
            "check", passed, model=asdict(config), checks=checks, left_out=left_out
        )
        return 0 if passed else 1
    say(console, headline)
    say(console, f"{_every(work)}\n")
    show_layer(console, results, results if args.all_tables else results[:1])
    for line in because:
        say(console, line)
    if args.mesh is None:
        passed = _show_refused(console, refused) and passed
    if args.html is not None:
        say(console, f"\nThe page is {args.html}.")
    return 0 if passed else 1


def _show_refused(console: Console, error: PlacementError | None) -> bool:
    say(console, f"\n{STORY}\n")
    if error is None:
        say(console, ACCEPTED, "bold red")
        return False
    say(console, str(error), "red")
    say(console, "\nMore of this kind, published: spmd-moe bugs")
    return True


def _compare_meshes(
    args: argparse.Namespace,
    console: Console,
    config: MoEConfig,
    work: Workload,
    preset: Preset,
) -> int:
    cp = _cp_of(args)
    ranks = parse_parallel(preset.mesh).num_ranks if args.ranks is None else args.ranks
    parallels = feasible(config, ranks, cp)
    every = replace(work, batch=work.batch * ranks)
    check_size(config, every)
    compared = compare(config, parallels, work)
    with progress(compared, "comparing meshes", len(parallels)) as shown:
        candidates = best_first(shown)
    if args.json:
        check_json.print_report(
            "meshes", True, model=asdict(config), work=check_json.of_work(every),
            meshes=[check_json.of_candidate(one) for one in candidates],
        )  # fmt: skip
        return 0
    say(console, _headline(args.preset or FIRST, config))
    say(console, f"on all ranks together {_tokens(every)}\n")
    best = candidates[:MESHES_SHOWN]
    with_cp = f" with cp={cp}" if cp > 1 else ""
    number = f"{len(best)} of {len(candidates)} meshes of {ranks} ranks{with_cp}"
    say(console, f"{number}, least memory first", "bold")
    show_candidates(console, best)
    say(console, MESHES_LEGEND)
    return 0


def _cp_of(args: argparse.Namespace) -> int:
    degrees, says_sp = parse_degrees(args.mesh or "")
    if says_sp or degrees != Parallel(cp=degrees.cp):
        raise BadInput(
            f"--mesh {args.mesh}: --compare-meshes tries every dp, tp, ep, etp and sp; "
            "give --ranks, and with --mesh at most cp, as --mesh cp=2"
        )
    return degrees.cp


def _headline(name: str, config: MoEConfig) -> str:
    shared = f", {config.num_shared_experts} shared" if config.num_shared_experts else ""
    return (
        f"{name}: dim {config.dim}, hidden {config.hidden_dim}, "
        f"{config.num_experts} experts ({config.top_k} for each token{shared})"
    )


def _every(work: Workload) -> str:
    return f"on every dp rank {_tokens(work)}"


def _tokens(work: Workload) -> str:
    dtype = str(work.dtype).removeprefix("torch.")
    several = "s" if work.batch > 1 else ""
    return f"{work.batch} sequence{several} of {work.seq_len} tokens, {dtype}"
