"""Writing snapshots to the durable tier: the process, its failures, and being killed anywhere."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from durable_snapshots import (
    data_parallel,
    private,
    save_snapshot,
    save_world,
    sharded,
    state_of,
    trained,
)

from robust_slurm.checkpoint import dcp_write, durable
from robust_slurm.checkpoint import digest as digests
from robust_slurm.checkpoint.commit import Done, Request, commit
from robust_slurm.checkpoint.dcp_write import write
from robust_slurm.checkpoint.durable_files import DurableError, digest_inside, read_inside
from robust_slurm.checkpoint.durable_verify import verify

RUN = "77.e0"


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    return state_of(*trained())


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    path = tmp_path / "tier"
    path.mkdir()
    return path


def tiny(path: Path, step: int, rank: int = 0, world: int = 1, fill: float = 1.0) -> Path:
    """A snapshot that takes little time to write."""
    piece = private(f"model.w{rank}", torch.full((50,), fill))
    return save_snapshot(path, [piece], {"extra.n": 3}, step=step, rank=rank, world=world)


def commit_now(
    tier: Path, step: int, world: int = 1, attempt: str = RUN, *, wait: float = 0, keep: int = 2
) -> Done:
    return commit(Request(tier, step, world, attempt, wait, keep), threading.Event())


def save(tier: Path, step: int, attempt: str = RUN, **more: Any) -> Path:
    """One committed step of one rank."""
    source = tiny(tier.parent / "own.safetensors", step, **more)
    write(str(source), tier, attempt)
    commit_now(tier, step, attempt=attempt)
    return durable.step_dir(tier, step)


def listed(tier: Path) -> list[int]:
    """Committed steps, each of them verified."""
    found = durable.committed(tier)
    for each in found:
        assert verify(each.path) == []
    return [each.step for each in found]


# ---------------------------------------------------------------- write and commit


@pytest.mark.parametrize("cut", [data_parallel, sharded])
def test_a_step_of_several_ranks(tmp_path: Path, tier: Path, state: Any, cut: Any) -> None:
    sources = save_world(tmp_path, state, 3, cut)
    for source in sources:
        assert not write(str(source), tier, RUN).already
        assert listed(tier) == []
    done = commit_now(tier, 100, 3)
    assert listed(tier) == [100]
    (found,) = durable.committed(tier)
    assert (found.world, found.bytes, found.attempt) == (3, done.bytes, RUN)
    names = sorted(p.name for p in found.path.iterdir())
    assert names == [
        ".metadata", *(f"{RUN}-{r}_0.distcp" for r in range(3)), f"{RUN}-commit.json",
        *(f"{RUN}-rank-{r}.json" for r in range(3)), "manifest.json",
    ]  # fmt: skip


def test_no_copy_of_the_data_is_made(tmp_path: Path, tier: Path) -> None:
    """torch clones a view of a larger storage before it writes it, and keeps all clones."""
    big = [private(f"model.{i}", torch.ones(1 << 20)) for i in range(8)]
    source = save_snapshot(tmp_path / "own.safetensors", big, {})
    code = (
        "import resource, sys, torch\n"
        "from pathlib import Path\n"
        "from robust_slurm.checkpoint.dcp_write import write\n"
        "torch.set_num_threads(1)\n"
        "def kb(name):\n"
        "    line = [l for l in open('/proc/self/status') if l.startswith(name)][0]\n"
        "    return int(line.split()[1])\n"
        "anon = kb('RssAnon')\n"
        "peak = [anon]\n"
        "import torch.distributed.checkpoint.filesystem as f\n"
        "original = f._write_item\n"
        "def watched(*a, **k):\n"
        "    out = original(*a, **k); peak.append(kb('RssAnon')); return out\n"
        "f._write_item = watched\n"
        f"write({str(source)!r}, Path({str(tier)!r}), 'x.e0')\n"
        "print(max(peak) - anon)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(out.stdout) < 12 << 10  # kB; the data are 32 MiB


def test_writing_the_same_again_does_nothing(tmp_path: Path, tier: Path) -> None:
    source = tiny(tmp_path / "a.safetensors", 5)
    first = write(str(source), tier, RUN)
    before = {p.name: p.stat().st_mtime_ns for p in durable.step_dir(tier, 5).iterdir()}
    again = write(str(source), tier, RUN)
    assert (first.already, again.already) == (False, True)
    assert {p.name: p.stat().st_mtime_ns for p in durable.step_dir(tier, 5).iterdir()} == before
    assert commit_now(tier, 5).bytes == commit_now(tier, 5).bytes
    assert listed(tier) == [5]


def test_a_part_of_other_content_is_replaced_until_it_is_committed(
    tmp_path: Path, tier: Path
) -> None:
    write(str(tiny(tmp_path / "a.safetensors", 5, fill=1.0)), tier, RUN)
    other = tiny(tmp_path / "b.safetensors", 5, fill=2.0)
    assert not write(str(other), tier, RUN).already
    commit_now(tier, 5)
    with pytest.raises(DurableError, match="another run under the same name"):
        write(str(tmp_path / "a.safetensors"), tier, RUN)
    assert listed(tier) == [5]


def test_an_unfinished_part_beside_another_attempts_step(tmp_path: Path, tier: Path) -> None:
    save(tier, 5, "77.e0")
    write(str(tiny(tmp_path / "a.safetensors", 5, fill=1.5)), tier, "77.e1")
    assert not write(str(tiny(tmp_path / "a.safetensors", 5, fill=2.5)), tier, "77.e1").already
    commit_now(tier, 5, attempt="77.e1")
    assert listed(tier) == [5]


@pytest.mark.parametrize("lost", ["data", "part"])
def test_a_part_that_was_lost_is_written_again(tmp_path: Path, tier: Path, lost: str) -> None:
    source = str(tiny(tmp_path / "a.safetensors", 5))
    write(source, tier, RUN)
    where = durable.step_dir(tier, 5)
    (where / (f"{RUN}-0_0.distcp" if lost == "data" else f"{RUN}-rank-0.json")).unlink()
    assert not write(source, tier, RUN).already
    commit_now(tier, 5)
    assert listed(tier) == [5]


def test_a_flipped_bit_never_becomes_durable(tmp_path: Path, tier: Path) -> None:
    source = tiny(tmp_path / "a.safetensors", 5)
    with open(source, "rb+") as file:
        good = digests.take(file.fileno(), source.stat().st_size)
        file.seek(-3, 2)
        file.write(b"\x55")
    with pytest.raises(DurableError, match="differs from its digest"):
        write(str(source), tier, RUN, good)
    assert not durable.step_dir(tier, 5).exists()


def test_a_torn_or_overwritten_source(
    tmp_path: Path, tier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torn = tiny(tmp_path / "torn.safetensors", 5)
    with open(torn, "rb+") as file:
        file.write(bytes(8))
    with pytest.raises(DurableError, match="torn"):
        write(str(torn), tier, RUN)
    with pytest.raises(DurableError, match="gone"):
        write(str(tmp_path / "absent"), tier, RUN)

    source = tiny(tmp_path / "a.safetensors", 6)
    original = dcp_write._write_data

    def slow(*args: Any) -> Any:
        done = original(*args)
        tiny(source, 7)
        return done

    monkeypatch.setattr(dcp_write, "_write_data", slow)
    with pytest.raises(DurableError, match="overwritten"):
        write(str(source), tier, RUN)
    assert list(durable.step_dir(tier, 6).iterdir()) == []


# ---------------------------------------------------------------- commit


def test_commit_waits_for_all_ranks(tmp_path: Path, tier: Path) -> None:
    write(str(tiny(tmp_path / "a.safetensors", 5, 0, 2)), tier, RUN)
    with pytest.raises(DurableError, match=r"no part of rank 1 in .*older checkpoints stay"):
        commit_now(tier, 5, 2, wait=0.3)
    outcome: list[Done] = []
    waiting = threading.Thread(target=lambda: outcome.append(commit_now(tier, 5, 2, wait=60)))
    waiting.start()
    write(str(tiny(tmp_path / "b.safetensors", 5, 1, 2)), tier, RUN)
    waiting.join(60)
    assert outcome
    assert listed(tier) == [5]


def test_the_same_commit_twice_at_once(tmp_path: Path, tier: Path) -> None:
    """A flush may ask for the step whose commit is under way: both succeed."""
    for step in range(1, 9):
        write(str(tiny(tmp_path / "own.safetensors", step)), tier, RUN)
        with ThreadPoolExecutor(4) as pool:
            done = list(pool.map(lambda _, step=step: commit_now(tier, step).step, range(4)))
        assert done == [step] * 4
        assert listed(tier)[-1] == step


def test_a_step_that_newer_commits_removed(tmp_path: Path, tier: Path) -> None:
    """Its own commit still waits for a part."""
    write(str(tiny(tmp_path / "a.safetensors", 5, 0, 2)), tier, RUN)
    said: list[str] = []

    def wait() -> None:
        with pytest.raises(DurableError) as failed:
            commit_now(tier, 5, 2, wait=60)
        said.append(str(failed.value))

    waiting = threading.Thread(target=wait)
    waiting.start()
    save(tier, 6)
    assert not durable.step_dir(tier, 5).exists()
    waiting.join(60)
    assert said == ["a newer step is on disk"]


def test_a_waiting_commit_opens_only_what_has_come(
    tmp_path: Path, tier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(str(tiny(tmp_path / "a.safetensors", 5, 1, 3)), tier, RUN)
    opened: list[str] = []

    def spy(where: Path, name: str, limit: int) -> bytes:
        opened.append(name)
        return read_inside(where, name, limit)

    monkeypatch.setattr("robust_slurm.checkpoint.commit.read_inside", spy)
    with pytest.raises(DurableError, match="no part of rank 0, 2 in"):
        commit_now(tier, 5, 3, wait=0.5)
    assert opened == [f"{RUN}-rank-1.json"]


def test_commit_is_given_up_when_asked(tier: Path) -> None:
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    with pytest.raises(DurableError, match="the writer ends"):
        commit(Request(tier, 5, 2, RUN, 1000, 2), stop)


def test_commit_refuses_parts_of_another_shape(tmp_path: Path, tier: Path) -> None:
    write(str(tiny(tmp_path / "a.safetensors", 5, 0, 2)), tier, RUN)
    with pytest.raises(DurableError, match=r"rank 0 of 2, not of .* rank 0 of 1"):
        commit_now(tier, 5, 1)
    assert listed(tier) == []


def test_commit_refuses_a_tensor_with_a_hole(tmp_path: Path, tier: Path, state: Any) -> None:
    sources = save_world(tmp_path, state, 2, data_parallel)
    write(str(sources[0]), tier, RUN)
    save_snapshot(sources[1], [], {}, step=100, rank=1, world=2)
    write(str(sources[1]), tier, RUN)
    with pytest.raises(DurableError, match="not complete"):
        commit_now(tier, 100, 2)
    assert listed(tier) == []


def test_commit_notices_a_data_file_cut_short(tmp_path: Path, tier: Path) -> None:
    write(str(tiny(tmp_path / "a.safetensors", 5)), tier, RUN)
    data = durable.step_dir(tier, 5) / f"{RUN}-0_0.distcp"
    os.truncate(data, 10)
    with pytest.raises(DurableError, match="has 10 bytes"):
        commit_now(tier, 5)


def test_retention_at_commit(tier: Path) -> None:
    for step in (10, 20, 30):
        save(tier, step)
    assert listed(tier) == [20, 30]


def test_another_attempt_replaces_a_committed_step(tier: Path) -> None:
    save(tier, 5, "77.e0", fill=1.0)
    save(tier, 5, "77.e1", fill=2.0)
    assert listed(tier) == [5]
    assert durable.read_manifest(durable.step_dir(tier, 5)).attempt == "77.e1"
    with pytest.raises(DurableError, match="came later"):
        save(tier, 5, "77.e0", fill=1.0)
    save(tier, 5, "99.e0", fill=3.0)  # another job
    assert listed(tier) == [5]


def test_two_attempts_at_once_leave_one_good_step(tmp_path: Path, tier: Path) -> None:
    attempts = ["a.e0", "b.e0", "c.e0"]
    for number, attempt in enumerate(attempts):
        source = tiny(tmp_path / f"{attempt}.safetensors", 5, fill=float(number))
        write(str(source), tier, attempt)
    failed: list[Exception] = []

    def again_and_again(attempt: str) -> None:
        try:
            for _ in range(8):
                commit_now(tier, 5, attempt=attempt)
        except Exception as err:  # noqa: BLE001 - reported below
            failed.append(err)

    threads = [threading.Thread(target=again_and_again, args=(a,)) for a in attempts]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if durable.committed(tier):
            assert verify(durable.step_dir(tier, 5)) == []
    for thread in threads:
        thread.join()
    assert not failed
    assert listed(tier) == [5]
    where = durable.step_dir(tier, 5)
    assert digest_inside(where, ".metadata") == durable.read_manifest(where).metadata


# ---------------------------------------------------------------- killed at every point


def in_child(work: Callable[[], object], die_at: int) -> bool:
    """Run ``work`` in a fork that ends before its ``die_at``-th change of a file. True: it did all.

    The interpreter's audit events come before each open, mkdir, rename, remove and rmdir.
    """
    pid = os.fork()
    if pid == 0:
        count = 0

        def hook(event: str, args: tuple[Any, ...]) -> None:
            nonlocal count
            writes = event == "open" and isinstance(args[2], int) and args[2] & 3
            if writes or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
                count += 1
                if count == die_at:
                    os._exit(9)

        code = 1
        try:
            sys.addaudithook(hook)
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_killed_before_any_change_of_a_file(tmp_path: Path) -> None:
    """Whatever point a writer dies at, all that is committed verifies, the older step is kept
    until the newer one is committed, and the next try succeeds."""
    torch.set_num_threads(1)
    sources = [tiny(tmp_path / f"{r}.safetensors", 20, r, 2, fill=2.0) for r in range(2)]
    replaced = 0
    for die_at in range(1, 200):
        tier = tmp_path / f"tier{die_at}"
        tier.mkdir()
        save(tier, 5)
        save(tier, 10)
        write(str(tiny(tmp_path / "old.safetensors", 20)), tier, "76.e0")

        def work(tier: Path = tier) -> None:
            for source in sources:
                write(str(source), tier, RUN)
            commit_now(tier, 20, 2, keep=1)

        finished = in_child(work, die_at)
        found = listed(tier)
        assert found in ([5, 10], [5, 10, 20], [10, 20], [20])
        replaced += found != [5, 10]
        work()
        assert listed(tier) == [20]
        if finished:
            break
    assert finished
    assert die_at > 12
    assert replaced > 2


def test_killed_while_another_attempt_replaces_a_step(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    source = tiny(tmp_path / "new.safetensors", 10, fill=2.0)
    for die_at in range(1, 200):
        tier = tmp_path / f"tier{die_at}"
        tier.mkdir()
        save(tier, 10, "77.e0")

        def work(tier: Path = tier) -> None:
            write(str(source), tier, "77.e1")
            commit_now(tier, 10, attempt="77.e1")

        finished = in_child(work, die_at)
        assert listed(tier) == [10]
        if finished:
            break
    assert finished
    assert durable.read_manifest(durable.step_dir(tier, 10)).attempt == "77.e1"


# ---------------------------------------------------------------- the process


class Process:
    """A running writer."""

    def __init__(self, *prefix: str) -> None:
        self.popen = subprocess.Popen(
            [*prefix, sys.executable, "-m", "robust_slurm.checkpoint.writer"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def send(self, **request: Any) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(request).encode() + b"\n")
        self.popen.stdin.flush()

    def reply(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, "the writer has ended"
        found = json.loads(line)
        assert isinstance(found, dict)
        return found

    def ask(self, **request: Any) -> dict[str, Any]:
        self.send(**request)
        return self.reply()


@contextlib.contextmanager
def running(*prefix: str) -> Iterator[Process]:
    process = Process(*prefix)
    try:
        yield process
    finally:
        process.popen.kill()
        process.popen.communicate()


def test_the_protocol(tmp_path: Path) -> None:
    tier = tmp_path / "not" / "yet"
    first = {
        "op": "write", "source": str(tiny(tmp_path / "0", 5, 0, 2)), "directory": str(tier),
        "attempt": RUN, "id": 1,
    }  # fmt: skip
    second = {**first, "source": str(tiny(tmp_path / "1", 5, 1, 2)), "id": 3}
    with running() as process:
        reply = process.ask(**first)
        assert reply["op"] == "written", reply
        assert (reply["id"], reply["step"], reply["rank"]) == (1, 5, 0)
        assert reply["bytes"] > 0
        assert os.getpriority(os.PRIO_PROCESS, process.popen.pid) == 19
        for ends in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            process.popen.send_signal(ends)  # Slurm signals the whole job; the writer goes on
        # A commit that waits does not hold up the write that it waits for.
        commit_it = {"op": "commit", "directory": str(tier), "step": 5, "world": 2, "keep": 2}
        process.send(**commit_it, attempt=RUN, wait=60, id=2)
        replies = [process.ask(**second), process.reply()]
        assert sorted((r["id"], r["op"]) for r in replies) == [(2, "committed"), (3, "written")]
        assert listed(tier) == [5]
        again = process.ask(**first)
        assert again["already"] is True
        refused = [
            process.ask(op="dance"),
            process.ask(**{**first, "attempt": "../x"}),
            process.ask(**{**first, "directory": "relative"}),
            process.ask(**{**first, "digest": "x"}),
            process.ask(**commit_it, attempt=RUN, wait=float("nan")),
            process.ask(**{**commit_it, "world": 0}, attempt=RUN, wait=1),
        ]
        assert {r["op"] for r in refused} == {"failed"}
        assert all(r["why"] for r in refused)
        process.send(**{**commit_it, "step": 6}, attempt=RUN, wait=1000, id=4)
        out, _ = process.popen.communicate(timeout=60)
        last = json.loads(out)
        assert (last["op"], last["request"], last["id"]) == ("failed", "commit", 4)
        assert process.popen.returncode == 0


def test_a_directory_that_vanishes_is_not_made_again(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    request = {"op": "write", "directory": str(tier), "attempt": RUN}
    with running() as process:
        assert process.ask(**request, source=str(tiny(tmp_path / "0", 5)))["op"] == "written"
        tier.rename(tmp_path / "unmounted")
        reply = process.ask(**request, source=str(tiny(tmp_path / "0", 6)))
        assert reply["op"] == "failed"
        assert "still mounted" in reply["why"]
        reply = process.ask(
            op="commit", directory=str(tier), step=5, world=1, attempt=RUN, wait=100, keep=2
        )
        assert "still mounted" in reply["why"]
        assert not tier.exists()
        (tmp_path / "unmounted").rename(tier)
        assert process.ask(**request, source=str(tiny(tmp_path / "0", 6)))["op"] == "written"


def test_a_file_that_cannot_grow(tmp_path: Path, tier: Path) -> None:
    """Stands for a quota: there is room, and yet writing fails in the middle."""
    big = [private("model.w", torch.ones(1 << 20))]
    source = save_snapshot(tmp_path / "own.safetensors", big, {}, step=5)
    request = {"op": "write", "directory": str(tier), "attempt": RUN, "source": str(source)}
    with running("prlimit", "--fsize=1000000") as process:
        reply = process.ask(**request)
        assert reply["op"] == "failed"
        assert str(tier) in reply["why"]
        assert "step 5" in reply["why"]
        assert "rank 0" in reply["why"]
        assert list(durable.step_dir(tier, 5).iterdir()) == []  # no space is kept
        small = process.ask(**{**request, "source": str(tiny(tmp_path / "t", 6))})
        assert small["op"] == "written"


def can_mount() -> bool:
    tried = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"])
    return tried.returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs a mount namespace")
@pytest.mark.parametrize(
    ("options", "says"),
    [("size=400k", "free space there, or keep fewer"), ("ro", "mounted read-only")],
)
def test_a_file_system_that_is_full_or_read_only(
    tmp_path: Path, tier: Path, options: str, says: str
) -> None:
    source = str(tiny(tmp_path / "0", 5))
    mount = f'mount -t tmpfs -o {options} none "$0" && exec "$@"'
    with running("unshare", "-rm", "sh", "-c", mount, str(tier)) as process:
        request = {"op": "write", "directory": str(tier), "attempt": RUN, "source": source}
        reply = process.ask(**request)
        assert reply["op"] == "failed"
        assert says in reply["why"]
        assert str(tier) in reply["why"]
        # It goes on, and says so again.
        assert process.ask(**request)["op"] == "failed"


def test_killed_at_random_moments(tmp_path: Path, tier: Path, state: Any) -> None:
    """The same as above for the real process, and for moments between two changes of files."""
    sources = save_world(tmp_path, state, 2, data_parallel, step=20)
    save(tier, 10)
    chance = random.Random(7)
    for round_ in range(3):
        with running() as process:
            process.ask(op="nothing")  # torch is imported
            for source in sources:
                process.send(
                    op="write", source=str(source), directory=str(tier), attempt=f"77.e{round_}"
                )
            process.send(
                op="commit", directory=str(tier), step=20, world=2, attempt=f"77.e{round_}",
                wait=30, keep=3,
            )  # fmt: skip
            time.sleep(chance.random() * 0.3)
            process.popen.send_signal(signal.SIGKILL)
        assert listed(tier) in ([10], [10, 20])
