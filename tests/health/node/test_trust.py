"""An interpreter that root runs: all that it would run is looked at, and nothing of it is run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from job_leftovers import OTHER, needs_root

from health.node.trust import interpreter as trust

pytestmark = needs_root


def environment(tmp_path: Path) -> Path:
    """A virtual environment as `python -m venv` makes it; its program."""
    for above in (tmp_path, *tmp_path.parents):
        if "pytest" in above.name:
            above.chmod(0o755)
    top = tmp_path / "venv"
    packages = top / "lib" / "python3.11" / "site-packages"
    (packages / "torch" / "__pycache__").mkdir(parents=True)
    (top / "bin").mkdir()
    (top / "bin" / "python3").symlink_to(os.path.realpath(sys.executable))
    (top / "bin" / "python").symlink_to("python3")
    (top / "lib64").symlink_to("lib")
    (top / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (packages / "torch" / "__init__.py").touch()
    (packages / "torch" / "__pycache__" / "x.pyc").touch()
    (tmp_path / "source").mkdir()
    (packages / "x.pth").write_text(f"import os\n# no line\n{tmp_path}/source\nmissing\n")
    for path in tmp_path.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755)
    return top / "bin" / "python"


def test_an_environment_of_roots(tmp_path: Path) -> None:
    trust(str(environment(tmp_path)))


SITE = "venv/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    "place",
    [
        f"{SITE}/x.pth",  # ran as uid 0
        SITE,
        f"{SITE}/torch/__init__.py",
        f"{SITE}/torch/__pycache__/x.pyc",
        "venv/lib",
        "venv/pyvenv.cfg",
        "venv/bin",
        "venv",
        "source",  # a line of x.pth
    ],
)
@pytest.mark.parametrize("how", ["owner", "mode", "sticky"])
def test_what_others_could_change(tmp_path: Path, place: str, how: str) -> None:
    python = environment(tmp_path)
    path = tmp_path / place
    changes: dict[str, Callable[[], None]] = {
        "owner": lambda: os.chown(path, OTHER, OTHER),
        "mode": lambda: path.chmod(0o775),
        "sticky": lambda: path.chmod(0o1777),
    }
    changes[how]()
    if how == "sticky" and place in ("venv/lib", f"{SITE}/torch"):
        return  # what is there is root's, and nothing is imported from it that comes beside it
    with pytest.raises(OSError) as raised:
        trust(str(python))
    assert str(raised.value.filename).startswith(str(path)), raised.value


def test_links_are_followed(tmp_path: Path) -> None:
    python = environment(tmp_path)
    away = tmp_path / "away"
    away.mkdir(mode=0o755)
    (away / "mod.py").touch()
    (tmp_path / SITE / "mod").symlink_to(away)
    trust(str(python))
    (away / "mod.py").chmod(0o666)
    with pytest.raises(OSError, match="written by others"):
        trust(str(python))


def test_a_link_to_nothing_or_to_itself(tmp_path: Path) -> None:
    for name, target in (("gone", "nowhere"), ("loop", "loop")):
        (tmp_path / name).symlink_to(target)
        with pytest.raises(OSError):
            trust(str(tmp_path / name))
