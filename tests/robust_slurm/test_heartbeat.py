"""The rank's side of the heartbeat, in real processes."""

import ast
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from beating_rank import PACKAGE, read, run

from robust_slurm import heartbeat
from robust_slurm.record import create, record_path


@pytest.mark.parametrize("made_by_shim", [True, False])
def test_beat_arrives(tmp_path: Path, made_by_shim: bool) -> None:
    if made_by_shim:
        create(record_path(str(tmp_path), 2, 3), epoch=2, local_rank=3)
    done = run(
        "import os; r.beat(9, loss=1.5, grad_norm=0.25); r.beat(10, loss=1.25); print(os.getpid())",
        tmp_path, ROBUST_EPOCH="2", LOCAL_RANK="3",
    )  # fmt: skip
    beat = read(tmp_path, 2, 3)
    assert (beat.step, beat.beats, beat.loss, beat.grad_norm) == (10, 2, 1.25, None)
    assert (beat.epoch, beat.local_rank, beat.rank, beat.source) == (2, 3, 6, "explicit")
    assert beat.pid == int(done.stdout)
    assert beat.t_mono > 0
    assert done.stderr == ""
    assert len(list(tmp_path.iterdir())) == 1


def test_a_process_tells_its_imports_once(tmp_path: Path) -> None:
    run(
        "import os, sys; from robust_slurm.rejoin import renew; sys._robust_slurm_hook = True; "
        "r.beat(1); os.environ['ROBUST_EPOCH'] = '2'; renew._begin_heartbeat(); r.beat(1)",
        tmp_path, ROBUST_EPOCH="1", ROBUST_LEARN="1",
    )  # fmt: skip
    assert read(tmp_path, 2).beats == 1
    assert [path.name for path in tmp_path.glob("*.modules")] == ["1-0.modules"]


def test_slurm_localid_is_the_second_choice(tmp_path: Path) -> None:
    run("r.beat(1)", tmp_path, LOCAL_RANK="", SLURM_LOCALID="5")
    assert read(tmp_path, 0, 5).step == 1


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')", "-float('inf')"])
def test_bad_loss_is_transported(tmp_path: Path, value: str) -> None:
    run(f"r.beat(1, loss={value})", tmp_path)
    loss = read(tmp_path).loss
    assert loss is not None
    assert not math.isfinite(loss)
    assert read(tmp_path).grad_norm is None


@pytest.mark.slow
def test_numpy_values_and_none(tmp_path: Path) -> None:
    run("import numpy as np; r.beat(np.int64(4), loss=np.float32(0.5), grad_norm=None)", tmp_path)
    beat = read(tmp_path)
    assert (beat.step, beat.loss, beat.grad_norm) == (4, 0.5, None)


@pytest.mark.parametrize("call", ["r.beat('x')", "r.beat(1.5)", "r.beat(1, loss='x')"])
def test_bad_arguments_warn_once_and_count(tmp_path: Path, call: str) -> None:
    done = run(f"for _ in range(3): {call}", tmp_path)
    assert read(tmp_path).beats == 3
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("robust-slurm: beat() got")


def test_step_beyond_64_bits_counts_without_a_number(tmp_path: Path) -> None:
    run("r.beat(1 << 70)", tmp_path)
    beat = read(tmp_path)
    assert (beat.beats, beat.step) == (1, None)


def test_phases_nest_survive_exceptions_and_decorate(tmp_path: Path) -> None:
    run(
        """
import sys
from robust_slurm.record import BeatReader, record_path
import os
reader = BeatReader(record_path(os.environ["ROBUST_BEAT_DIR"], 0, 0))
now = lambda: reader.read().phase
with r.phase("eval"):
    first = reader.read()
    assert first.phase == "eval" and first.phases == 1 and first.beats == 0
    try:
        with r.phase("säve" * 20):
            assert now() == "säve" * 6 + "s", now()   # 31 bytes would end inside a character
            raise KeyError
    except KeyError:
        pass
    assert now() == "eval"
    assert reader.read().phase_since > first.phase_since
assert now() == ""

@r.phase("generate")
def answer(depth):
    "docs"
    assert now() == "generate"
    return answer(depth - 1) if depth else 42
assert answer(2) == 42 and answer.__doc__ == "docs"
assert now() == "" and reader.read().phases == 10
with r.phase(7): assert now() == "7"
""",
        tmp_path,
    )


def test_outside_robust_srun_nothing_happens(tmp_path: Path) -> None:
    done = run(
        "import sys\nr.beat('anything', loss=object())\n"
        "with r.phase('x'): pass\n"
        "print(r.attach(), r.epoch(), r.restart_reason(), r.resume_step(), 'mmap' in sys.modules)",
        None,
    )
    assert done.stdout.split() == ["False", "0", "None", "None", "False"]
    assert done.stderr == ""


def test_restart_facts() -> None:
    done = run(
        "print(r.epoch(), r.restart_reason(), r.resume_step())", None,
        ROBUST_EPOCH="4", ROBUST_RESTART_REASON="node-loss", ROBUST_RESUME_STEP="120",
    )  # fmt: skip
    assert done.stdout.split() == ["4", "node-loss", "120"]


@pytest.mark.parametrize(
    ("state", "anew"),
    [
        ({"w": {"step": 1}}, True),
        ({"w": {"step": 1.0, "exp_avg": 0}}, True),
        ({"w": {"step": 41}}, False),  # it was resumed
        ({"w": {"momentum": 0}}, False),  # not known
        ({}, False),
        (None, False),
    ],
)
def test_an_optimizer_that_has_made_one_step(state: object, anew: bool) -> None:
    assert heartbeat._made_one_step(SimpleNamespace(state=state)) is anew


@pytest.mark.parametrize("trouble", ["missing", "file", "symlink", "short", "garbage", "rank"])
def test_trouble_in_setup_is_one_warning(tmp_path: Path, trouble: str) -> None:
    directory, env = tmp_path, {}
    record = tmp_path / "0-0.beat"
    if trouble == "missing":
        directory = tmp_path / "gone"
    elif trouble == "file":
        directory = record
        record.touch()
    elif trouble == "symlink":
        (tmp_path / "victim").write_bytes(bytes(256))
        record.symlink_to(tmp_path / "victim")
    elif trouble == "short":
        record.touch()
    elif trouble == "garbage":
        record.write_bytes(b"x" * 256)
    else:
        env = {"LOCAL_RANK": "two"}
    done = run("r.beat(1); r.beat(2)\nwith r.phase('x'): print('trained')", directory, **env)
    assert done.stdout == "trained\n"
    assert done.stderr.count("\n") == 1
    assert "no heartbeat from this process" in done.stderr
    if trouble == "symlink":
        assert (tmp_path / "victim").read_bytes() == bytes(256)


CHILD = "def child(step):\n    import robust_slurm as r\n    r.beat(step)\n"


def test_forked_child_never_writes_the_parents_record(tmp_path: Path) -> None:
    run(
        "import os\nr.beat(5)\npid = os.fork()\n"
        "if pid == 0:\n    r.beat(99)\n    r.phase('x').__enter__()\n    os._exit(0)\n"
        "os.waitpid(pid, 0)\nr.beat(6)",
        tmp_path,
    )
    beat = read(tmp_path)
    assert (beat.step, beat.beats, beat.phases) == (6, 2, 0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("parent_first", [True, False])
def test_multiprocessing_children_leave_the_record_alone(
    tmp_path: Path, method: str, parent_first: bool
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        CHILD + "if __name__ == '__main__':\n"
        "    import multiprocessing as mp, robust_slurm as r\n"
        f"    if {parent_first}: r.beat(5)\n"
        f"    p = mp.get_context({method!r}).Process(target=child, args=(99,))\n"
        "    p.start(); p.join(); assert p.exitcode == 0\n"
        "    r.beat(6)\n"
    )
    run(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')", tmp_path)
    beat = read(tmp_path)
    assert (beat.step, beat.beats) == (6, 2 if parent_first else 1)


def test_spawned_rank_may_attach(tmp_path: Path) -> None:
    run(
        "import multiprocessing as mp\n"
        "def rank(n):\n    assert r.attach(local_rank=n)\n    r.beat(10 + n)\n"
        "ps = [mp.get_context('fork').Process(target=rank, args=(n,)) for n in (0, 1)]\n"
        "for p in ps: p.start()\n"
        "for p in ps:\n    p.join()\n    assert p.exitcode == 0",
        tmp_path,
    )
    assert [read(tmp_path, 0, n).step for n in (0, 1)] == [10, 11]


def test_record_goes_to_the_first_process_and_after_its_end_to_the_next(tmp_path: Path) -> None:
    beat_and_pid = "import os, robust_slurm as r; r.beat({}); print(os.getpid())"
    done = run(
        "import subprocess, sys\n"
        f"first = subprocess.run([sys.executable, '-c', {beat_and_pid.format(1)!r}])\n"
        "r.beat(2)\n"  # takes over from the dead one, with counts of its own
        f"late = subprocess.run([sys.executable, '-c', {beat_and_pid.format(3)!r}])\n"
        "import os; print(os.getpid())",
        tmp_path,
    )
    beat = read(tmp_path)
    assert (beat.step, beat.beats, beat.pid) == (2, 1, int(done.stdout.split()[-1]))
    assert done.stderr == ""


def test_import_brings_in_next_to_nothing() -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        f"sys.path.insert(0, {str(PACKAGE.parent)!r})\n"
        "import robust_slurm; print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["robust_slurm"]


@pytest.mark.parametrize(
    "name",
    [
        "__init__.py",
        "heartbeat.py",
        "layout.py",
        "process_stat.py",
        "record.py",
        "standby.py",
        "text.py",
    ]
    + [f"auto/{path.name}" for path in (PACKAGE / "auto").glob("*.py")]
    + [str(path.relative_to(PACKAGE)) for path in (PACKAGE / "data").rglob("*.py")],
)
def test_syntax_is_that_of_python_3_9(name: str) -> None:
    ast.parse((PACKAGE / name).read_text(), feature_version=(3, 9))
