"""`--mesh dp=2,tp=2,ep=2,sp=on`: degrees of parallelism, or sizes of axes, as one word."""

from typing import Any, NamedTuple

from spmd_moe.checks.errors import BadInput
from spmd_moe.config import Parallel

DEGREES = ("dp", "cp", "tp", "ep", "etp")
SWITCH = {"on": True, "off": False}
SYNTAX = "dp=2,cp=1,tp=2,ep=2,etp=1,sp=on"
AXES_SYNTAX = "dp=2,tp=4"


class Degrees(NamedTuple):
    """What `--mesh` says, and whether it says something of sp: if not, both are meant."""

    parallel: Parallel
    says_sp: bool


def parse_degrees(text: str) -> Degrees:
    """Parse degrees, 1 where `text` names none; BadInput if it cannot be read."""
    said = _items(text)
    for key in said:
        if key not in (*DEGREES, "sp"):
            raise BadInput(f"--mesh {text}: {key!r} is no axis; write it as {SYNTAX}")
    sp = said.pop("sp", None)
    if sp is not None and sp not in SWITCH:
        raise BadInput(f"--mesh {text}: sp is {sp!r}; give sp=on or sp=off")
    sizes: Any = {key: _size(text, key, value) for key, value in said.items()}
    try:
        parallel = Parallel(**sizes, sequence_parallel=SWITCH[sp or "off"])
    except ValueError as error:
        raise BadInput(f"--mesh {text}: {error}") from None
    return Degrees(parallel, sp is not None)


def parse_parallel(text: str) -> Parallel:
    """Parse degrees, with a missing sp as off."""
    return parse_degrees(text).parallel


def parse_mesh(text: str) -> dict[str, int]:
    """Parse axes of any names with their sizes; there must be at least one axis."""
    said = _items(text)
    for key in said or {text: ""}:
        if not key.isidentifier():
            raise BadInput(f"--mesh {text}: {key!r} is no axis; write it as {AXES_SYNTAX}")
    return {key: _size(text, key, value) for key, value in said.items()}


def print_parallel(parallel: Parallel) -> str:
    """Print degrees as `parse_parallel` reads them, without degrees of 1."""
    said = [f"{key}={n}" for key in DEGREES if (n := getattr(parallel, key)) > 1]
    return ",".join([*said, *(["sp=on"] if parallel.sequence_parallel else [])]) or "dp=1"


def _items(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in filter(None, text.replace(" ", "").split(",")):
        key, _, value = item.partition("=")
        if key in found:
            raise BadInput(f"--mesh {text}: {key} is given twice; give it once")
        found[key] = value
    return found


def _size(text: str, key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 10 and int(value) >= 1):
        raise BadInput(
            f"--mesh {text}: {key} is {value!r}; give a whole number of at least 1, such "
            f"as {key}=2"
        )
    return int(value)
