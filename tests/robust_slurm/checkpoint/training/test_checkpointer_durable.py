"""Outside robust-srun, with the real store and writer: killed, started again, the same losses."""

from __future__ import annotations

import functools
import re
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest
from torch_forks import TorchForks

from robust_slurm.checkpoint.durable import tier, verify
from robust_slurm.checkpoint.store.events import CommittedEvent, PersistedEvent
from robust_slurm.checkpoint.store.own_store import OwnStore

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, sys, time, torch, torch.distributed as dist
import robust_slurm
directory, steps, every, stop_at, how = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
interval = {"every": every} if every else {"minutes": float(os.environ["MINUTES"])} \
    if "MINUTES" in os.environ else {}
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(5)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 16))
if world > 1:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
torch.manual_seed(100 + rank)
ckpt = robust_slurm.Checkpointer(model=model, optimizer=optimizer, extra={"s": schedule, "n": 0},
                                 directory=directory, **interval)
if how == "term":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
first = ckpt.resume()
print(f"rank {rank} resumed {first} n {ckpt.extra['n']}", flush=True)
for step in range(first, steps):
    x = torch.randn(4, 16)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step(); schedule.step()
    ckpt.extra["n"] = step + 1
    ckpt.save(step + 1)
    print(f"rank {rank} loss {step + 1} {loss.item().hex()}", flush=True)
    if step + 1 == stop_at:
        if how == "raise":
            raise SystemError("as planned")
        number = stop_at // every * every if every else first + 1
        wanted = os.path.join(directory, f"step-{number:08d}", "manifest.json")
        end = time.monotonic() + 120
        while not os.path.exists(wanted) and time.monotonic() < end:
            time.sleep(0.01)
        if how in ("kill", "term"):
            os.kill(os.getpid(), 9 if how == "kill" else signal.SIGTERM)
ckpt.close()
if world > 1:
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # programs/teardown.py says why
"""


class Ran(NamedTuple):
    """The outcome of a training."""

    resumed: dict[int, int]  # step by rank
    losses: dict[tuple[int, int], str]  # by rank and step
    err: str
    codes: list[int]


class Run(Protocol):
    """``stop_at``: the step at which it waits for the step on disk and is killed, waits only
    (``how`` is wait), or fails (raise)."""

    def __call__(
        self,
        directory: Path,
        steps: int,
        every: int = 5,
        stop_at: int = 0,
        how: str = "kill",
        world: int = 1,
        minutes: float | None = None,
    ) -> Ran: ...


@pytest.fixture(scope="module")
def run(torch_forks: TorchForks) -> Run:
    def made(
        directory: Path,
        steps: int,
        every: int = 5,
        stop_at: int = 0,
        how: str = "kill",
        world: int = 1,
        minutes: float | None = None,
    ) -> Ran:
        env = {} if minutes is None else {"MINUTES": str(minutes)}
        if world > 1:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
        options = [str(directory), str(steps), str(every), str(stop_at), how]
        ranks = [
            torch_forks.start(
                SCRIPT, *options, env={**env, **({"RANK": str(rank)} if world > 1 else {})}
            )
            for rank in range(world)
        ]
        codes = [rank.wait() for rank in ranks]
        out, err = (
            "".join(text) for text in zip(*((r.out(), r.err()) for r in ranks), strict=True)
        )
        resumed = {int(r): int(s) for r, s in re.findall(r"rank (\d+) resumed (\d+)", out)}
        losses = {
            (int(r), int(s)): loss for r, s, loss in re.findall(r"rank (\d+) loss (\d+) (\S+)", out)
        }
        return Ran(resumed, losses, err, codes)

    return made


Whole = Callable[[int], tuple[Path, Ran]]


@pytest.fixture(scope="module")
def whole(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Trainings of 9 steps that nothing befell, by world size, with steps 5 and 9 on disk."""

    @functools.cache
    def made(world: int) -> tuple[Path, Ran]:
        directory = tmp_path_factory.mktemp("whole") / "a"
        ran = run(directory, 9, stop_at=5, how="wait", world=world)
        assert ran.codes == [0] * world, ran.err
        assert [c.step for c in tier.committed(directory)] == [5, 9]
        return directory, ran

    return made


@pytest.mark.parametrize("world", [1, 2])
def test_killed_and_started_again_the_losses_are_the_same_bits(
    tmp_path: Path, run: Run, whole: Whole, world: int
) -> None:
    losses = whole(world)[1].losses
    _, _, err, codes = run(tmp_path / "b", 9, stop_at=7, world=world)
    assert codes == [-signal.SIGKILL] * world, err
    assert [c.step for c in tier.committed(tmp_path / "b")] == [5]
    resumed, again, err, codes = run(tmp_path / "b", 9, world=world)
    assert codes == [0] * world, err
    assert resumed == dict.fromkeys(range(world), 5)
    assert len(losses) == 9 * world
    assert again == {key: losses[key] for key in losses if key[1] > 5}
    newest = tier.newest(tmp_path / "b")
    assert newest is not None and newest.step == 9  # close() wrote the last one
    assert verify.verify(newest.path) == []


@pytest.mark.parametrize("world", [1, 2])
def test_a_directory_alone_is_enough(tmp_path: Path, run: Run, world: int) -> None:
    """The first step of a new training is written, the last one at close(), others by minutes; and
    a line at the start says so."""
    ran = run(tmp_path / "a", 9, every=0, stop_at=7, world=world)
    assert ran.codes == [-signal.SIGKILL] * world, ran.err
    assert [c.step for c in tier.committed(tmp_path / "a")] == [1]
    said = f"checkpoints: to {tmp_path / 'a'} every 10 minutes, the first step"
    assert ran.err.count("robust-slurm") == ran.err.count(said) == 1, ran.err
    ran = run(tmp_path / "a", 9, every=0, world=world)
    assert (ran.resumed, ran.codes) == (dict.fromkeys(range(world), 1), [0] * world), ran.err
    assert [c.step for c in tier.committed(tmp_path / "a")] == [1, 9]
    ran = run(tmp_path / "b", 60, every=0, world=world, minutes=0.001)
    assert ran.codes == [0] * world and "robust-slurm" not in ran.err, ran.err
    assert 60 in [c.step for c in tier.committed(tmp_path / "b")]


def test_a_script_that_exits_at_sigterm_loses_nothing(tmp_path: Path, run: Run) -> None:
    ran = run(tmp_path / "a", 9, every=0, stop_at=7, how="term")
    assert ran.codes == [143], ran.err
    assert run(tmp_path / "a", 9, every=0).resumed == {0: 7}


def test_an_exception_does_not_lose_the_last_step(tmp_path: Path, run: Run) -> None:
    _, _, err, codes = run(tmp_path / "a", 9, every=100, stop_at=4, how="raise")
    assert codes == [1] and "as planned" in err
    resumed, _, err, codes = run(tmp_path / "a", 9, every=100)
    assert (resumed, codes) == ({0: 4}, [0]), err


def test_a_damaged_newest_step_is_passed_over(tmp_path: Path, run: Run, whole: Whole) -> None:
    shutil.copytree(whole(1)[0], tmp_path / "a")
    newest = tier.newest(tmp_path / "a")
    assert newest is not None and newest.step == 9
    (data,) = newest.path.glob("*.distcp")
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    resumed, _, err, codes = run(tmp_path / "a", 9)
    assert (resumed, codes) == ({0: 5}, [0]), err
    assert "step 9 is skipped" in err
    for each in tier.committed(tmp_path / "a"):
        for data in each.path.glob("*.distcp"):
            data.write_bytes(b"")
    _, _, err, codes = run(tmp_path / "a", 9)
    assert codes == [1]
    assert "can be used" in err and "to start from scratch, move them away" in err


def test_manifests_that_cannot_be_read_are_named_and_never_a_fresh_start(
    tmp_path: Path, run: Run, whole: Whole
) -> None:
    shutil.copytree(whole(1)[0], tmp_path / "a")
    older, newest = tier.committed(tmp_path / "a")
    manifest = newest.path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100])
    resumed, _, err, codes = run(tmp_path / "a", 5)
    assert (resumed, codes) == ({0: 5}, [0]), err
    assert re.search(r"step 9 is skipped: .*no manifest that this reads", err), err
    manifest = older.path / "manifest.json"
    newer = manifest.read_text().replace('"version":1', '"version":99')
    manifest.write_text(newer)
    _, _, err, codes = run(tmp_path / "a", 5)
    assert codes == [1] and "none of the checkpoints" in err and "version 99" in err, err


def test_two_ranks_of_a_data_parallel_world_go_on_as_one(
    tmp_path: Path, run: Run, whole: Whole
) -> None:
    shutil.copytree(whole(2)[0], tmp_path / "a")
    resumed, losses, err, codes = run(tmp_path / "a", 10)
    assert (resumed, codes) == ({0: 9}, [0]), err
    assert (0, 10) in losses


def test_ranks_that_save_faster_than_they_write_leave_out_no_step(tmp_path: Path, run: Run) -> None:
    """Each would leave out others, and none would be whole on disk."""
    _, _, err, codes = run(tmp_path / "a", 6, every=1, world=2)
    assert codes == [0, 0], err
    assert "checkpoint directory" not in err
    steps = [c.step for c in tier.committed(tmp_path / "a")]
    # On a busy machine a commit may overtake older ones: which are then not needed, or leave their
    # own steps for the next commit to remove.
    assert len(steps) <= 3 and steps[-1:] == [6], steps


def test_a_directory_that_cannot_be_written_does_not_stop_training(
    tmp_path: Path, run: Run
) -> None:
    (tmp_path / "a").write_text("no directory")
    _, _, err, codes = run(tmp_path / "a", 1)
    assert codes == [1] and "cannot be read" in err  # at resume: nothing is silently started anew
    (tmp_path / "a").unlink()
    (tmp_path / "a").symlink_to("/proc/nowhere")
    _, losses, err, codes = run(tmp_path / "a", 6)
    assert codes == [0], err
    assert len(losses) == 6
    assert "not in" in err


def test_only_what_is_lost_is_said() -> None:
    """A step that a newer one on disk replaces is not named; steps that time left out, once."""
    said: list[str] = []
    store = OwnStore(said.append)
    try:
        for step in (10, 15):
            store._emit(PersistedEvent(0, step, False, "passed over: busy", 0.0))
        store._emit(CommittedEvent(20, False, "no part of rank 1"))
        store._emit(CommittedEvent(30, True, ""))
        store._emit(CommittedEvent(25, False, "the store is closing"))
        store._emit(CommittedEvent(35, False, "a newer step is on disk"))  # 40's word comes later
        store._emit(PersistedEvent(0, 40, False, "the disk is full", 0.0))
    finally:
        store.close()
    assert said == [
        *["not all steps go to the checkpoint directory: passed over: busy"] * 2,  # say() says once
        "step 20 is not in the checkpoint directory: no part of rank 1",
        "step 40 is not in the checkpoint directory: the disk is full",
    ]
