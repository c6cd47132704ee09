"""`--mesh dp=2,tp=2,ep=2,sp=on`: degrees of parallelism as one word."""

from typing import Any

from spmd_moe.cli.terminal import BadInput
from spmd_moe.config import Parallel

DEGREES = ("dp", "cp", "tp", "ep", "etp")
SWITCH = {"on": True, "off": False}
SYNTAX = "dp=2,cp=1,tp=2,ep=2,etp=1,sp=on"


def parse_parallel(text: str) -> Parallel:
    """The degrees that `text` names, 1 for the others; BadInput if it cannot be read."""
    found: dict[str, Any] = {}
    for item in filter(None, text.replace(" ", "").split(",")):
        key, _, value = item.partition("=")
        name = "sequence_parallel" if key == "sp" else key
        if key not in (*DEGREES, "sp"):
            raise BadInput(f"--mesh {text}: {key!r} is no axis; write it as {SYNTAX}")
        if name in found:
            raise BadInput(f"--mesh {text}: {key} is given twice; give it once")
        if key == "sp":
            if value not in SWITCH:
                raise BadInput(f"--mesh {text}: sp is {value!r}; give sp=on or sp=off")
            found[name] = SWITCH[value]
        elif not (value.isascii() and value.isdigit() and int(value) >= 1):
            raise BadInput(
                f"--mesh {text}: {key} is {value!r}; give a whole number of at least 1, "
                f"such as {key}=2"
            )
        else:
            found[name] = int(value)
    try:
        return Parallel(**found)
    except ValueError as error:
        raise BadInput(f"--mesh {text}: {error}") from None


def print_parallel(parallel: Parallel) -> str:
    """In the syntax that `parse_parallel` reads; degrees of 1 are left out."""
    said = [f"{key}={n}" for key in DEGREES if (n := getattr(parallel, key)) > 1]
    return ",".join([*said, *(["sp=on"] if parallel.sequence_parallel else [])]) or "dp=1"
