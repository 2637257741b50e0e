"""The choice of the node that brings the job back when the batch host is lost."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_slurm.frames.wire import Codec, WireError
from robust_slurm.slurm import Allotted, Job, SlurmError
from srun_wrapper.agent import batch_host_failover
from srun_wrapper.agent.batch_host_failover import AGREE, ask_peer, claim, elected
from srun_wrapper.protocol.messages import Peer, PeerSay, decode_ask, encode
from srun_wrapper.protocol.task_options import TaskOptions
from srun_wrapper.requeue import slurm_wait
from srun_wrapper.requeue.resubmit import Limits, copy_args

KEY = b"s" * 32
SILENT = AGREE + 2.5


@pytest.mark.parametrize(
    ("index", "answers", "lost", "acts"),
    [
        (1, {}, 0, True),  # two nodes: only we are left
        (1, {2: SILENT, 3: SILENT}, 0, True),
        (2, {1: SILENT, 3: SILENT}, 0, False),
        (1, {2: SILENT, 3: 0.1}, 0, False),  # 3 still hears it: a veto
        (1, {0: SILENT, 2: SILENT}, 0, True),  # the lost host's silence says nothing
        (1, {0: 0.1, 2: SILENT}, 0, False),  # but there the supervisor lives: a veto
        (1, {0: 0.1}, 0, False),
        (1, {2: None, 3: None, 4: None}, 0, False),  # we are the ones cut off
        (1, {2: None, 3: SILENT, 4: None}, 0, True),  # half is enough
        (2, {1: None, 3: SILENT}, 0, True),  # 1 died as well
        (9, {0: None, 1: SILENT, 2: SILENT}, 0, False),  # a place that is nobody's peer
        (0, {1: SILENT}, None, True),  # supervisor on a node without ranks
    ],
)
def test_elected(
    index: int, answers: dict[int, float | None], lost: int | None, acts: bool
) -> None:
    assert elected(index, answers, lost) is acts


def vote(island: Iterable[int], places: Iterable[int], silent: dict[int, float]) -> list[int]:
    """Return the members of ``island`` that act when they hear each other and nobody else."""
    island = set(island)
    return [
        me
        for me in sorted(island)
        if elected(me, {p: silent[p] if p in island else None for p in places if p != me}, 0)
    ]


@settings(deadline=None)
@given(st.sets(st.integers(1, 30), min_size=1, max_size=8), st.data())
def test_exactly_one_acts_when_all_agree(places: set[int], data: st.DataObject) -> None:
    silent = {p: data.draw(st.floats(AGREE, 60.0)) for p in places}
    assert vote(places, places, silent) == [min(places)]


@settings(deadline=None)
@given(st.sets(st.integers(1, 30), min_size=2, max_size=8), st.data())
def test_one_that_hears_the_supervisor_is_a_veto(places: set[int], data: st.DataObject) -> None:
    hears = data.draw(st.sampled_from(sorted(places)))
    silent = dict.fromkeys(places, SILENT)
    silent[hears] = data.draw(st.floats(0.0, AGREE, exclude_max=True))
    assert [p for p in vote(places, places, silent) if p != hears] == []


@settings(deadline=None)
@given(st.sets(st.integers(1, 30), min_size=3, max_size=8), st.data())
def test_islands(places: set[int], data: st.DataObject) -> None:
    """A minority never acts; within one island never more than one does."""
    island = data.draw(st.sets(st.sampled_from(sorted(places)), min_size=1))
    silent = dict.fromkeys(places, SILENT)
    acting = vote(island, places, silent)
    assert acting == ([min(island)] if 2 * len(island) >= len(places) else [])


def test_claim_is_exclusive(tmp_path: Path) -> None:
    assert [claim(tmp_path, 0) for _ in range(3)] == [True, False, False]
    assert claim(tmp_path, 1)


def test_claim_without_a_shared_directory(tmp_path: Path) -> None:
    assert claim(tmp_path / "nowhere", 0)


class Answerer:
    """A peer's probe port that serves one connection. ``say`` None: it takes it and is mute."""

    def __init__(self, say: PeerSay | None, key: bytes = KEY) -> None:
        self._say, self._key = say, key
        self.asked: list[int] = []
        self._sock = socket.create_server(("127.0.0.1", 0))
        self._sock.settimeout(5.0)
        self.peer = Peer(3, "127.0.0.1", self._sock.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        conn, _ = self._sock.accept()
        codec = Codec(self._key, server=True)
        with conn:
            conn.settimeout(5.0)
            conn.sendall(codec.preface())
            while data := conn.recv(4096):
                try:
                    payloads = codec.feed(data)
                except WireError:
                    return
                for payload in payloads:
                    self.asked.append(decode_ask(payload).job_id)
                    if self._say is not None:
                        conn.sendall(codec.seal(encode(self._say)))

    def close(self) -> None:
        self._thread.join(5.0)
        self._sock.close()


@pytest.mark.parametrize(
    ("say", "key", "answer"),
    [
        (PeerSay(3, 4.25), KEY, 4.25),
        (PeerSay(3, 4.25), b"another step's key", None),
        (None, KEY, None),
    ],
)
def test_ask_peer(
    say: PeerSay | None, key: bytes, answer: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "srun_wrapper.agent.batch_host_failover.ASK", 0.3 if answer is None else 5.0
    )
    peer = Answerer(say, key)
    assert ask_peer(peer.peer, KEY, 42) == answer
    peer.close()
    assert peer.asked == ([42] if key == KEY else [])


def test_ask_a_dead_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    assert ask_peer(Peer(1, "127.0.0.1", port), KEY, 42) is None


def job(**changes: Any) -> Job:
    values: dict[str, Any] = {
        "id": 12,
        "name": "train",
        "exclude": ("n9",),
        "num_nodes": 3,
        "account": "ai",
        "qos": None,
        "reservation": None,
        "tres_per_node": "gpu:4",
        "features": None,
        "time_limit_s": 3600,
        "cpus_per_task": 1,
        "min_memory_node_mb": 0,
        "min_memory_cpu_mb": 2048,
        "oversubscribe": "NO",
        "raw": {"StdOut": "/h/out", "StdErr": "(null)", "TimeLimit": "01:00:00"},
    }
    return cast(Job, SimpleNamespace(**(values | changes)))


def test_copy_args_make_the_same_job_elsewhere() -> None:
    env = {"SLURM_JOB_NUM_NODES": "4", "SLURM_NTASKS_PER_NODE": "2", "ROBUST_BY_PLUGIN": "full"}
    args = copy_args(job(), Limits(("n9", "n1")), "train,standby", env)
    assert "--robust=full" in args, "its srun lines go through robust-srun, as before"
    assert "--exclude=n9,n1" in args
    assert "--nodes=4" in args  # as it was before nodes left it
    assert {"--partition=train,standby", "--no-kill", "--exclusive", "--gres=gpu:4"} <= set(args)
    assert {"--time=01:00:00", "--ntasks-per-node=2", "--mem-per-cpu=2048M"} <= set(args)
    assert not [a for a in args if a.startswith(("--qos", "--error", "--mem="))]


def test_copy_args_without_a_known_host() -> None:
    args = copy_args(
        job(exclude=(), oversubscribe="OK", time_limit_s=None), Limits(()), "train", {}
    )
    assert "--nodes=3" in args
    assert not [a for a in args if a.startswith(("--exclude", "--time", "--exclusive"))]


@dataclass
class Rescue:
    """A rescue of job 12 by the agent of n2, whose Slurm is away at first."""

    said: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    nodes: tuple[str, ...] = ("n1", "n2")
    restarts: int = 0
    began: int = 0
    """The job's restarts, as this step began."""
    silent: list[float | None] = field(default_factory=list)
    """The answers of the peers, in the order in which they are asked; then None."""
    others: int = 0
    """Peers besides the batch host's agent."""

    def run(self, records: Path) -> None:
        peers = (Peer(0, "10.0.0.1", 1), *(Peer(n + 2, f"10.0.0.{n + 3}", 1)
                                           for n in range(self.others)))  # fmt: skip
        place: Any = SimpleNamespace(server="10.0.0.1", job_id=7, node="n2")
        start: Any = SimpleNamespace(peers=peers, index=1, env={})
        options = TaskOptions(slurm_wait=60, restarts=self.began)
        batch_host_failover.rescue(place, KEY, start, records, options, self.said.append)


@pytest.fixture
def rescue(monkeypatch: pytest.MonkeyPatch) -> Rescue:
    case = Rescue()
    away = iter([SlurmError("unreachable", (), "connect failure")] * 3)

    class Door:
        def __init__(self, deadline_s: float) -> None:
            pass

        def job(self, _number: int) -> Job:
            for error in away:
                raise error
            known = {"batch": True, "batch_host": "n1", "restarts": case.restarts}
            return job(running=True, state="RUNNING", nodes=case.nodes, **known)

    monkeypatch.setattr(slurm_wait, "PAUSES", (0.01,))
    monkeypatch.setattr(batch_host_failover, "Slurm", Door)
    monkeypatch.setattr(
        batch_host_failover, "ask_peer", lambda *_a: case.silent.pop(0) if case.silent else None
    )
    monkeypatch.setattr(
        batch_host_failover, "bring_back", lambda *_a: case.done.append("copy") or 13
    )
    monkeypatch.setattr(batch_host_failover, "let_go", lambda *_a: case.done.append("end"))
    return case


def test_the_job_is_brought_back_when_slurm_is_back(tmp_path: Path, rescue: Rescue) -> None:
    """Neither twice nor in place of a run that Slurm has begun by itself meanwhile."""
    rescue.run(tmp_path)
    assert rescue.done == ["copy", "end"]
    assert "Slurm does not answer" in rescue.said[0] and "goes on as job 13" in rescue.said[-1]
    rescue.restarts = 1
    rescue.run(tmp_path)
    assert rescue.done == ["copy", "end"] and "nothing to bring back" in rescue.said[-1]


def test_a_job_that_was_requeued_before_is_brought_back(tmp_path: Path, rescue: Rescue) -> None:
    """A standby node's environment does not tell how often: it took that for another run."""
    rescue.restarts = rescue.began = 1
    rescue.run(tmp_path)
    assert rescue.done == ["copy", "end"]


def test_a_node_that_the_job_has_replaced_does_not_end_the_job(
    tmp_path: Path, rescue: Rescue
) -> None:
    """The node was cut off from everything, Slurm too, and elected itself: it had no other peer."""
    rescue.nodes = ("n1", "n3")
    rescue.run(tmp_path)
    assert not rescue.done and "this node has left" in rescue.said[-1]


def test_the_peers_are_asked_again_after_an_absence_of_slurm(
    tmp_path: Path, rescue: Rescue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor waits for a node that was cut off: the batch host's agent hears it."""
    monkeypatch.setattr(batch_host_failover, "AGREE", 0.01)
    rescue.silent = [None, 0.001]
    rescue.run(tmp_path)
    assert not rescue.done and "cut off" in rescue.said[-1] and not rescue.silent


def test_peers_that_were_not_elected_are_not_missed_later(
    tmp_path: Path, rescue: Rescue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These peers end at once, and Slurm may take its time: the job is brought back anyway."""
    monkeypatch.setattr(batch_host_failover, "AGREE", 0.01)
    rescue.others, rescue.silent = 3, [None, SILENT, SILENT, SILENT]
    rescue.run(tmp_path)
    assert rescue.done == ["copy", "end"]


@pytest.mark.parametrize("wait", [0.0, 60.0])
def test_a_standby_node_is_released_after_an_absence_of_slurm(
    wait: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's srun died with the batch host: nobody else would release it, or what keeps it."""
    away = iter([SlurmError("unreachable", (), "connect failure")] * 3)
    cancelled: list[int] = []

    class Door:
        def __init__(self, deadline_s: float) -> None:
            pass

        def allotted(self, name: str) -> list[Allotted]:
            assert name == "robust-standby-7"
            for error in away:
                raise error
            rows = [(70, "RUNNING", "s1"), (71, "RUNNING", "s1"), (72, "RUNNING", "s2")]
            return [Allotted(n, 1, state, "None", (node,)) for n, state, node in rows]

        def cancel(self, number: int) -> None:
            for error in away:
                raise error
            cancelled.append(number)

    monkeypatch.setattr(slurm_wait, "PAUSES", (0.01,))
    monkeypatch.setattr(batch_host_failover, "Slurm", Door)
    said: list[str] = []
    place: Any = SimpleNamespace(node="s1", job_id=70)
    batch_host_failover.release_standby(place, 7, said.append, wait)
    assert cancelled == ([71, 70] if wait else [])
    assert ("cannot release" in said[-1]) is not bool(wait)
