"""A node without ranks that runs the script as far as its standby_point."""

from __future__ import annotations

import decimal
import fcntl
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import slot_driver
from slot_driver import Driver

from robust_slurm.auto.warm import merged
from robust_slurm.record import Beat, BeatReader, record_path
from srun_wrapper.agent.warm.imports import Learnt, pack
from srun_wrapper.protocol.messages import Warmup

drivers, drive = slot_driver.drivers, slot_driver.drive
AHEAD = """
import os, pathlib, signal, sys
import robust_slurm
(pathlib.Path(sys.argv[1]) / "built").write_text(f"{os.getpid()} {os.environ.get('RANK')}")
print("thrown away before it is a rank", end=" ")
{before}
robust_slurm.standby_point()
print(os.environ["RANK"], os.getpid(), flush=True)
robust_slurm.beat(1)
signal.pause()
"""


def ahead(tmp_path: Path, before: str = "") -> tuple[list[str], Learnt]:
    path = tmp_path / "script.py"
    path.write_text(AHEAD.replace("{before}", before))
    words = [sys.executable, str(path), str(tmp_path)]
    return words, Learnt(1, tuple(words), {}, (("decimal", decimal.__file__),), standby=True)


def built(d: Driver) -> list[str]:
    path = d.base / "built"
    d.wait(lambda: path.exists() and path.read_text().endswith("None"))
    return path.read_text().split()


def test_a_spare_runs_as_far_as_the_standby_point(drive: Any, tmp_path: Path) -> None:
    words, learnt = ahead(tmp_path)
    d = drive(*words, warm=True)
    d.order(Warmup(pack(learnt)))
    pid = int(built(d)[0])
    d.wait(lambda: "ahead" in (d.base / "warm-ahead").read_text())
    assert Path(f"/proc/{pid}/comm").read_text() == "robust-warm\n"
    started = d.launch(rank=5)
    assert started.warm and started.pid == pid
    d.wait(lambda: d.stdout() == f"5 {pid}\n")
    assert b"RANK=5" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    again = d.launch(epoch=2, rank=5)  # from the interpreter that is left
    assert again.warm and again.pid != pid
    d.wait(lambda: d.stdout().endswith(f"5 {again.pid}\n"))


def test_a_spare_that_fails_on_its_way_is_not_missed(drive: Any, tmp_path: Path) -> None:
    words, learnt = ahead(tmp_path, "if 'RANK' not in os.environ: sys.exit('no rank')")
    d = drive(*words, warm=True)
    d.order(Warmup(pack(learnt)))
    pid = int(built(d)[0])
    d.wait(lambda: pid not in d.below())
    started = d.launch(rank=5)
    assert started.warm and started.pid != pid
    d.wait(lambda: d.stdout().endswith(f"5 {started.pid}\n"))
    assert "no rank" not in d.stderr()


def go_ahead(d: Driver, learnt: Learnt) -> int:
    d.order(Warmup(pack(learnt)))
    pid = int(built(d)[0])
    d.wait(lambda: "ahead" in (d.base / "warm-ahead").read_text())
    return pid


def beat(d: Driver, epoch: int) -> Beat | None:
    return BeatReader(record_path(str(d.base), epoch, 0)).read()


def test_what_the_script_has_done_before_stays(drive: Any, tmp_path: Path) -> None:
    """Environment, directory and seeds stay; phases claim no record until the process is a rank."""
    pytest.importorskip("numpy")
    before = """
import numpy.random
numpy.random.seed(1234)
os.environ["SET"] = "by the script"
os.environ.pop("GONE")
os.chdir("/usr")
with robust_slurm.phase("index"):
    pass
inside = robust_slurm.phase("build")
inside.__enter__()
"""
    words, learnt = ahead(tmp_path, before)
    script = Path(words[1])
    after = "print(os.environ['RANK'], os.environ['SET'], 'GONE' in os.environ, os.getcwd(),"
    after += " numpy.random.randint(1 << 30), flush=True)\ninside.__exit__()\nrobust_slurm.beat(7)"
    script.write_text(
        script.read_text().replace('print(os.environ["RANK"], os.getpid(), flush=True)', after)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GONE", "before")
        d = drive(*words, warm=True)
    pid = go_ahead(d, learnt)
    assert not list(tmp_path.glob("*.beat"))
    assert d.launch(rank=5).pid == pid
    import numpy.random

    number = numpy.random.RandomState(1234).randint(1 << 30)
    d.wait(lambda: d.stdout() == f"5 by the script False /usr {number}\n")
    d.wait(lambda: (b := beat(d, 1)) is not None and b.step == 1 and b.beats == 2)
    assert [path.name for path in tmp_path.glob("*.beat")] == ["1-0.beat"]


@pytest.mark.parametrize("which", ["script.py", "mine.py"])
def test_a_change_of_its_code_is_noticed(drive: Any, tmp_path: Path, which: str) -> None:
    (tmp_path / "mine.py").write_text("VALUE = 1\n")
    words, learnt = ahead(tmp_path, "import mine")
    d = drive(*words, warm=True)
    pid = go_ahead(d, learnt)
    path = tmp_path / which
    path.write_text(path.read_text() + "# changed\n")
    started = d.launch(rank=5)
    assert not started.warm and started.pid != pid
    d.wait(lambda: d.stdout().endswith(f"5 {started.pid}\n"))


def test_a_change_of_its_code_on_the_way_is_noticed(drive: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("VALUE = 1\n")
    change = "import mine\nif 'RANK' not in os.environ: open(mine.__file__, 'a').write('# changed')"
    words, learnt = ahead(tmp_path, change)
    d = drive(*words, warm=True)
    d.order(Warmup(pack(learnt)))
    pid = int(built(d)[0])
    d.wait(lambda: pid not in d.below())
    assert d.launch(rank=5).pid != pid


def test_it_is_no_rank_that_the_script_has_set_up_otherwise(drive: Any, tmp_path: Path) -> None:
    words, learnt = ahead(tmp_path, "os.environ.setdefault('RANK', '0')")
    d = drive(*words, warm=True)
    pid = go_ahead(d, learnt)
    started = d.launch(rank=5)
    assert not started.warm and started.pid != pid
    d.wait(lambda: d.stdout().endswith(f"5 {started.pid}\n"))


def test_nobody_goes_ahead_beside_a_rank(drive: Any, tmp_path: Path) -> None:
    words, learnt = ahead(tmp_path, "open(sys.argv[1] + '/runs', 'a').write('x')")
    d = drive(*words, warm=True)
    with (d.base / "warm.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the node has ranks at once: the imports come too late
        d.order(Warmup(pack(learnt)))
        started = d.launch(rank=5)
    d.order(Warmup(pack(learnt)))
    assert not started.warm
    d.wait_warm()  # by what the rank itself has learnt
    again = d.launch(epoch=2, rank=5)
    assert again.warm
    d.wait(lambda: d.stdout().endswith(f"5 {again.pid}\n"))
    assert (tmp_path / "runs").read_text() == "xx"


@pytest.mark.parametrize("how", ["os._exit(0)", "os.closerange(3, 64)"])
def test_one_that_cannot_be_reached_is_ended(drive: Any, tmp_path: Path, how: str) -> None:
    words, learnt = ahead(tmp_path, f"if 'RANK' not in os.environ: {how}; signal.pause()")
    d = drive(*words, warm=True)
    d.order(Warmup(pack(learnt)))
    pid = int(built(d)[0])
    d.wait(lambda: pid not in d.below())
    started = d.launch(rank=5)
    assert started.warm and started.pid != pid  # from the interpreter that is left


@pytest.mark.parametrize(
    ("first", "changed", "rank", "expected"),
    [
        ({"A": "1"}, {"A": "1"}, {"A": "2", "RANK": "0"}, {"A": "2", "RANK": "0"}),
        ({"A": "1"}, {"A": "2"}, {"A": "1", "RANK": "0"}, {"A": "2", "RANK": "0"}),
        ({"A": "1"}, {}, {"A": "1", "RANK": "0"}, {"RANK": "0"}),
        ({}, {"B": "3"}, {"RANK": "0"}, {"B": "3", "RANK": "0"}),
        ({"A": "1"}, {"A": "2"}, {"A": "3"}, None),
        ({}, {"RANK": "0"}, {"RANK": "5"}, None),
        ({"A": "1"}, {}, {"A": "2"}, None),
    ],
)
def test_environments(
    first: Mapping[str, str],
    changed: Mapping[str, str],
    rank: Mapping[str, str],
    expected: Mapping[str, str] | None,
) -> None:
    given = dict(first), dict(changed), dict(rank)
    if expected is None:
        with pytest.raises(RuntimeError, match="a rank's own"):
            merged(*given)
    else:
        assert merged(*given) == expected
