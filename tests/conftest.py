"""What holds for all tests: no time limits on generated examples, directories others can pass."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says nothing on a machine that does something else too.
settings.register_profile(
    "untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def _passable(tmp_path_factory: pytest.TempPathFactory) -> None:
    """xdist puts a directory per worker among pytest's, which tests open for other users."""
    tmp_path_factory.getbasetemp().chmod(0o711)
