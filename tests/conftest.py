"""What holds for all tests: who shares a worker, and no time limits on generated examples."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says nothing on a machine that does something else too.
settings.register_profile(
    "untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under ``pytest -n`` a file's tests share a worker, so that its fixtures are made once.

    Tests with labs of their own go to whichever worker is free.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if "new_lab" not in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(scope="session", autouse=True)
def _passable(tmp_path_factory: pytest.TempPathFactory) -> None:
    """xdist puts a directory per worker among pytest's, which tests open for other users."""
    tmp_path_factory.getbasetemp().chmod(0o711)
