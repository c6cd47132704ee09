"""`spmd-moe check | train | bugs | lint`: arguments in, exit code out.

Exit codes: 0 all is right, 1 a check failed, 2 the input cannot be used, 3 the checker
itself failed, which is no verdict. Errors are without a traceback unless `--debug` asks.
"""

import argparse
import importlib
import os
import sys
from typing import NoReturn

import torch

from placements import PlacementError, UnsupportedTorchError, __version__
from spmd_moe.checks.errors import BadInput
from spmd_moe.cli.terminal import CRASHED, crash_text, make_console

# command -> (the module that runs it, what it does)
COMMANDS: dict[str, tuple[str, str]] = {
    "check": ("spmd_moe.cli.check", "type-check and run a layer for a mesh"),
    "train": ("spmd_moe.cli.train", "train a small language model on local processes"),
    "bugs": ("spmd_moe.cli.bugs", "published bugs, and what refuses them"),
    "lint": ("spmd_moe.cli.lint", "find what the migration guide is about in source"),
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, like every other error of the command."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def _version() -> str:
    """Return the versions that a report of a bug should name."""
    python = ".".join(map(str, sys.version_info[:3]))
    return f"spmd-moe {__version__} (torch {torch.__version__}, Python {python})"


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = _Parser(
        prog="spmd-moe",
        description="Check a Mixture-of-Experts layer for a mesh, train with it, and see "
        "which published bugs its types refuse.",
        epilog="exit codes: 0 all is right, 1 a check failed, 2 the input cannot be used, "
        "3 the checker itself failed",
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (module, about) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=about,
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--debug", action="store_true", help="errors with traceback")
        if name in given:  # the others need not be imported
            importlib.import_module(module).add_arguments(command)
    chosen = parser.parse_args(given)
    module, _ = COMMANDS[chosen.command]
    try:
        code = importlib.import_module(module).run(chosen, make_console())
        print(end="", flush=True)  # here, where it can be said that it fails
        return code
    except PlacementError as error:
        if chosen.debug:
            raise
        print(error, file=sys.stderr)
        return 1
    except (BadInput, UnsupportedTorchError) as error:
        if chosen.debug:
            raise
        line = " ".join(str(error).split())
        print(f"spmd-moe {chosen.command}: {line}", file=sys.stderr)
        return 2
    except OSError as error:  # of the output; files that are asked for are BadInput
        if chosen.debug:
            raise
        if not isinstance(error, BrokenPipeError):  # else the reader has seen enough
            print(f"spmd-moe {chosen.command}: cannot write: {error}", file=sys.stderr)
        # Python writes what is left when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"spmd-moe {chosen.command}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if chosen.debug or chosen.command == "train":  # training judges no program
            raise
        print(f"spmd-moe {chosen.command}: {crash_text(error)}", file=sys.stderr)
        return CRASHED
