"""Tests marked `deep` are for the long run: `--placements-profile deep`."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "deep: only in the deep profile")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--placements-profile") == "deep":
        return
    left_out = [item for item in items if item.get_closest_marker("deep")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
