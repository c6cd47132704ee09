"""pytest plugin: how many examples the laws try, `--placements-profile dev|ci|deep`.

`dev` is for work at the desk; `ci` is derandomised, so that a failure is one's own;
`deep` is for the night. In a project of one's own: `pytest -p placements.testing.plugin`.
Without the option the project's own profile of hypothesis stays.
"""

import pytest
from hypothesis import HealthCheck, settings

PROFILES: dict[str, settings] = {
    "dev": settings(max_examples=50, deadline=None),
    "ci": settings(max_examples=500, derandomize=True, deadline=None, database=None),
    "deep": settings(
        max_examples=20_000,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    ),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--placements-profile",
        choices=sorted(PROFILES),
        help="how many examples the laws of placements try (default: as hypothesis is set)",
    )


def pytest_configure(config: pytest.Config) -> None:
    for name, profile in PROFILES.items():
        settings.register_profile(f"placements-{name}", profile)
    chosen = config.getoption("--placements-profile")
    if chosen is not None:
        settings.load_profile(f"placements-{chosen}")
