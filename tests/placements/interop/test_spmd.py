"""Programs written for `spmd_types` under our checker: only the import is changed."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import spmd_types
import torch
from torch import Tensor

import placements as pl
from placements import PlacementError
from placements.interop import spmd
from placements.testing import device_mesh, run_ranks
from tests.migrate.judge import BY_IMPORT, difference, run
from tests.migrate.patterns import NAMES, PEER, pattern

# Those that our checker refuses, and why; what to write is in after_placements.py.
CANNOT = {
    "token_indices": "computed by arithmetic",  # an index that is read from no extent
    "fsdp2_with_ep": "the table of ops does not know it",  # placements.fully_shard
}


@pytest.mark.parametrize("name", NAMES)
def test_a_pattern_of_the_guide_by_a_change_of_import(name: str) -> None:
    one = pattern(name)
    if name in CANNOT:
        with pytest.raises(PlacementError, match=CANNOT[name]):
            run(one, one.imported_otherwise(), PEER, BY_IMPORT)
    else:
        assert difference(one, run(one, one.imported_otherwise(), PEER, BY_IMPORT)) is None


def test_every_public_name_of_the_peer_is_there_or_refused_by_name() -> None:
    names = {name for name in vars(spmd_types) if not name.startswith("_")}
    files = {
        "annotations",
        "checker",
        "runtime",
        "types",
        "rulecheck",
    }  # __future__, and its files
    missing = {n for n in names - files if not hasattr_or_refused(n)}
    assert not missing, sorted(missing)


def hasattr_or_refused(name: str) -> bool:
    if name in spmd.REFUSED:
        with pytest.raises(NotImplementedError, match="Write instead"):
            getattr(spmd, name)
        return True
    return hasattr(spmd, name)


def checked(body: Callable[[Tensor], Any]) -> list[Any]:
    def on_rank() -> Any:
        x = torch.arange(8.0).double().view(4, 2)
        with spmd.set_current_mesh(device_mesh()), spmd.typecheck():
            return body(x)

    return run_ranks({"dp": 2, "tp": 2}, on_rank)


BOTH = {"dp": spmd.R, "tp": spmd.R}


def test_declarations_in_the_words_of_the_peer() -> None:
    def body(x: Tensor) -> None:
        y = spmd.assert_type(x.clone().detach(), spmd.R, {"tp": spmd.V})
        assert spmd.get_local_type(y) == {"dp": spmd.R, "tp": spmd.V}
        spmd.assert_type(
            x, BOTH | {"tp": spmd.V}, partition_spec=spmd.PartitionSpec("tp", None)
        )
        spmd.assert_type(x, {"tp": spmd.V})  # less than S(0), and true
        spmd.assert_type(x, {"tp": spmd.S(0)})  # of one axis
        assert pl.type_of(x) == {"dp": pl.R, "tp": pl.S(0)}
        with pytest.raises(PlacementError):
            spmd.assert_type(x, {"dp": spmd.I})
        with pytest.raises(ValueError, match="cuts over it"):
            spmd.assert_type(x, BOTH, partition_spec=spmd.PartitionSpec("tp", None))

    checked(body)


def test_dtypes_and_groups() -> None:
    def body(x: Tensor) -> Tensor:
        x = spmd.assert_type(x.float(), BOTH | {"tp": spmd.P}).requires_grad_()
        group = device_mesh().get_group("tp")
        y = spmd.all_reduce(
            x, group, dst=spmd.R, op_dtype=torch.float64, out_dtype=torch.float64,
            backward_options={"op_dtype": torch.float64},
        )  # fmt: skip
        assert y.dtype == torch.float64
        return y.detach()

    assert torch.equal(checked(body)[0], 2 * torch.arange(8.0).double().view(4, 2))


def test_split_sizes_are_extents() -> None:
    def body(x: Tensor) -> Tensor:
        rank = device_mesh().get_local_rank("tp")
        sizes = [3, 1]
        with spmd.no_typecheck():
            mine = x.split(sizes)[int(rank)].clone()
        cut = pl.assert_type(mine, {"dp": pl.R, "tp": pl.S(0, pl.Ragged(*sizes))})
        return spmd.all_gather(cut, "tp", src=spmd.S(0), dst=spmd.R, split_sizes=sizes)

    assert torch.equal(checked(body)[3], torch.arange(8.0).double().view(4, 2))


def test_what_is_refused_says_what_to_write() -> None:
    def body(x: Tensor) -> None:
        spmd.assert_type(x, BOTH | {"tp": spmd.P})
        for option, instead in (
            ("async_op", "without async_op"),
            ("inplace", "use the result"),
        ):
            with pytest.raises(NotImplementedError, match=instead):
                spmd.all_reduce(x, "tp", dst=spmd.R, **{option: True})
        with pytest.raises(NotImplementedError, match="local_axes"):
            spmd.set_current_mesh(device_mesh(), local_axes=("dp",))

    checked(body)
    with pytest.raises(NotImplementedError, match="permissive"):
        spmd.typecheck("permissive")
    with pytest.raises(AttributeError):
        spmd.no_such_name  # noqa: B018


def test_a_local_map_gives_what_it_says() -> None:
    def body(x: Tensor) -> None:
        spmd.assert_type(x, BOTH | {"tp": spmd.S(0)})
        rows = spmd.local_map(out_types=BOTH | {"tp": spmd.S(0)})(
            lambda x: x.sort(0).values
        )
        assert pl.type_of(rows(x)) == {"dp": pl.R, "tp": pl.S(0)}
        with pytest.raises(PlacementError):  # each rank's own sum is no sum of all
            spmd.local_map(out_types=BOTH)(lambda x: x.sum(0))(x)

    checked(body)


def test_the_peer_need_not_be_installed() -> None:
    code = "import sys; from placements.interop import spmd; print('spmd_types' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
