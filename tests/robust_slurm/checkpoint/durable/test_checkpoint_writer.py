"""The writer's process: its protocol, file systems that fail, and SIGKILL at any moment."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from durable_snapshots import (
    data_parallel,
    private,
    save_snapshot,
    save_world,
)
from durable_tiers import RUN, listed, save, tiny
from torch_forks import TorchForks

from robust_slurm.checkpoint.durable import tier as durable

pytestmark = pytest.mark.slow


class Process:
    """A running writer, by its ends of the pipes."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid = pid
        self._stdin = stdin
        self._stdout = stdout

    def send(self, **request: Any) -> None:
        self._stdin.write(json.dumps(request).encode() + b"\n")
        self._stdin.flush()

    def reply(self) -> dict[str, Any]:
        line = self._stdout.readline()
        assert line, "the writer has ended"
        found = json.loads(line)
        assert isinstance(found, dict)
        return found

    def ask(self, **request: Any) -> dict[str, Any]:
        self.send(**request)
        return self.reply()


def talk_to(popen: subprocess.Popen[bytes]) -> Process:
    assert popen.stdin is not None and popen.stdout is not None
    return Process(popen.pid, popen.stdin, popen.stdout)


@contextlib.contextmanager
def started(*prefix: str) -> Iterator[subprocess.Popen[bytes]]:
    """The writer as the store starts it."""
    command = [*prefix, sys.executable, "-m", "robust_slurm.checkpoint.durable.writer"]
    popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield popen
    finally:
        popen.kill()
        popen.communicate()


@contextlib.contextmanager
def forked(forks: TorchForks) -> Iterator[Process]:
    """The same, without the import of torch."""
    (their_in, our_in), (our_out, their_out) = os.pipe(), os.pipe()
    code = "from robust_slurm.checkpoint.durable.writer import main; main()"
    with open(our_in, "wb") as stdin, open(our_out, "rb") as stdout:
        fork = forks.start(code, stdin=their_in, stdout=their_out)
        os.close(their_in)
        os.close(their_out)
        try:
            yield Process(fork.pid, stdin, stdout)
        finally:
            fork.kill()


def test_what_it_needs_is_imported_before_its_priority_is_lowered(
    torch_forks: TorchForks,
) -> None:
    """A training that keeps all cores busy held up the imports, and with them its first steps."""
    code = """
import os, sys
from robust_slurm.checkpoint.durable import writer
def lowered(by):
    here = "robust_slurm.checkpoint.durable."
    print(by, [here + each in sys.modules for each in ("commit", "dcp.write")], file=sys.stderr)
os.nice = lowered
writer.main()
"""
    fork = torch_forks.start(code)
    assert (fork.wait(), fork.err()) == (0, "19 [True, True]\n")


def test_the_protocol(tmp_path: Path) -> None:
    tier = tmp_path / "not" / "yet"
    first = {
        "op": "write", "source": str(tiny(tmp_path / "0", 5, 0, 2)), "directory": str(tier),
        "attempt": RUN, "id": 1,
    }  # fmt: skip
    second = {**first, "source": str(tiny(tmp_path / "1", 5, 1, 2)), "id": 3}
    with started() as popen:
        process = talk_to(popen)
        reply = process.ask(**first)
        assert reply["op"] == "written", reply
        assert (reply["id"], reply["step"], reply["rank"]) == (1, 5, 0)
        assert reply["bytes"] > 0
        assert os.getpriority(os.PRIO_PROCESS, popen.pid) == 19
        for ends in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            popen.send_signal(ends)  # Slurm signals the whole job; the writer goes on
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
        out, _ = popen.communicate(timeout=60)
        last = json.loads(out)
        assert (last["op"], last["request"], last["id"]) == ("failed", "commit", 4)
        assert popen.returncode == 0


def test_a_directory_that_vanishes_is_not_made_again(
    torch_forks: TorchForks, tmp_path: Path
) -> None:
    tier = tmp_path / "tier"
    request = {"op": "write", "directory": str(tier), "attempt": RUN}
    with forked(torch_forks) as process:
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


def test_a_file_that_cannot_grow(torch_forks: TorchForks, tmp_path: Path, tier: Path) -> None:
    """Stands for a quota: there is room, and yet writing fails in the middle."""
    big = [private("model.w", torch.ones(1 << 20))]
    source = save_snapshot(tmp_path / "own.safetensors", big, {}, step=5)
    request = {"op": "write", "directory": str(tier), "attempt": RUN, "source": str(source)}
    with forked(torch_forks) as process:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000000, 1000000))
        reply = process.ask(**request)
        assert reply["op"] == "failed"
        assert str(tier) in reply["why"]
        assert "step 5" in reply["why"]
        assert "rank 0" in reply["why"]
        assert not durable.step_dir(tier, 5).exists()  # no space is kept
        small = process.ask(**{**request, "source": str(tiny(tmp_path / "t", 6))})
        assert small["op"] == "written"


def can_mount() -> bool:
    tried = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"])
    return tried.returncode == 0


@pytest.fixture(scope="module")
def beside_mounts(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Process, dict[str, Path]]]:
    """A writer, and where it alone sees file systems mounted, by their options."""
    mounts = {options: tmp_path_factory.mktemp("mount") for options in ("size=400k", "ro")}
    script = (
        'mount -t tmpfs -o size=400k none "$0" && mount -t tmpfs -o ro none "$1" && shift && '
        'exec "$@"'
    )
    with started("unshare", "-rm", "sh", "-c", script, *map(str, mounts.values())) as popen:
        yield talk_to(popen), mounts


@pytest.mark.skipif(not can_mount(), reason="needs a mount namespace")
@pytest.mark.parametrize(
    ("options", "says"),
    [("size=400k", "free space there, or keep fewer"), ("ro", "mounted read-only")],
)
def test_a_file_system_that_is_full_or_read_only(
    tmp_path: Path, beside_mounts: tuple[Process, dict[str, Path]], options: str, says: str
) -> None:
    process, mounts = beside_mounts
    tier = mounts[options]
    source = str(tiny(tmp_path / "0", 5))
    request = {"op": "write", "directory": str(tier), "attempt": RUN, "source": source}
    reply = process.ask(**request)
    assert reply["op"] == "failed"
    assert says in reply["why"]
    assert str(tier) in reply["why"]
    # It goes on, and says so again.
    assert process.ask(**request)["op"] == "failed"


def test_killed_at_random_moments(
    torch_forks: TorchForks, tmp_path: Path, tier: Path, trained_state: Any
) -> None:
    """The same as above for the real process, and for moments between two changes of files."""
    sources = save_world(tmp_path, trained_state, 2, data_parallel, step=20)
    save(tier, 10)
    chance = random.Random(7)
    for round_ in range(3):
        with forked(torch_forks) as process:
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
            os.kill(process.pid, signal.SIGKILL)
        assert listed(tier) in ([10], [10, 20])
