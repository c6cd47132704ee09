"""One directory belongs to one run at a time."""

from pathlib import Path

import pytest

from spmd_moe.training.errors import Unusable
from spmd_moe.training.lock import locked


def test_a_directory_is_locked_until_the_run_ends(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(Unusable, match="another run is using it"), locked(tmp_path):
            pass
        (tmp_path / "other").mkdir()
        with locked(tmp_path / "other"):
            pass
    with locked(tmp_path):
        pass
