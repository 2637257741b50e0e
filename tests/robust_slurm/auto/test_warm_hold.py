"""The time that a warm rank stays behind rank 0: until there is a store, or for its time."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from robust_slurm.auto import listening
from robust_slurm.auto.listening import listens
from srun_wrapper.agent.processes.head_start import HEAD_START, head_start
from srun_wrapper.protocol.messages import RankStart

LONG = 30.0  # s; no passing test waits so long


@pytest.fixture(autouse=True)
def _ranks_of_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROBUST_BEAT_DIR", str(tmp_path))
    monkeypatch.setenv("ROBUST_EPOCH", "2")
    monkeypatch.setitem(sys.modules, listening.STORE, ModuleType(listening.STORE))


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket that does not listen yet, at MASTER_PORT."""
    monkeypatch.setattr(listening, "_MOST_WAIT", LONG)
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(made.getsockname()[1]))
        yield made


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """This is the first rank of another node, whose address leads here; what lets the others of
    the node go on."""
    monkeypatch.setattr(listening, "_elsewhere", lambda _address: True)
    monkeypatch.setattr(listening, "visits", True)
    sizes = {"RANK": "8", "LOCAL_RANK": "0", "NODE_RANK": "1", "SLURM_NNODES": "2"}
    for name, value in sizes.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "2-0.store"


@pytest.fixture(params=["beside", "elsewhere"])
def where(request: pytest.FixtureRequest) -> None:
    """Rank 0's machine is this one, or another."""
    if request.param == "elsewhere":
        request.getfixturevalue("far")


def held(seconds: float) -> tuple[bool, float]:
    """Return whether it took the whole time, and the time it took."""
    before = time.monotonic()
    listening.hold(before + seconds)
    return time.monotonic() >= before + seconds, time.monotonic() - before


@pytest.mark.usefixtures("where")
def test_it_goes_on_where_there_is_a_store(bound: socket.socket) -> None:
    bound.listen()
    assert not held(LONG)[0]


@pytest.mark.usefixtures("where")
def test_it_goes_on_when_there_is_one(bound: socket.socket) -> None:
    later = threading.Timer(0.1, bound.listen)
    began = time.monotonic()
    later.start()
    whole, _ = held(LONG)
    assert time.monotonic() - began >= 0.1 and not whole
    later.join()


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("port", ["", "x", "²", "-1", "65536", "9" * 5000, "0"])
def test_without_one_it_waits_its_time(
    bound: socket.socket, port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if port != "0":  # else at the port where nothing listens
        monkeypatch.setenv("MASTER_PORT", port)
    assert held(0.05)[0]


@pytest.mark.usefixtures("where")
def test_a_time_that_is_over_is_not_waited_for(
    bound: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    listening.hold(0.0)
    assert not slept


def test_who_looks_for_no_store_does_not_wait(
    bound: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, listening.STORE)
    assert not held(LONG)[0]


def test_a_time_that_is_too_long_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_MOST_WAIT", 0.05)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert not held(LONG)[0]


@pytest.mark.parametrize(
    ("family", "address"),
    [
        (socket.AF_INET, "127.0.0.1"),
        (socket.AF_INET, "0.0.0.0"),
        (socket.AF_INET6, "::1"),
        (socket.AF_INET6, "::"),
    ],
)
def test_who_listens_is_seen(family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family) as one:
        try:
            one.bind((address, 0))
        except OSError as error:
            pytest.skip(f"{address}: {error}")
        port = str(one.getsockname()[1])
        assert not listens(port), "bound, no more"
        one.listen()
        assert listens(port)
    assert not listens(port)


def test_an_end_of_a_connection_is_no_listener() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as end,
    ):
        assert listens(str(server.getsockname()[1]))
        assert not listens(str(end.getsockname()[1]))


def test_a_kernel_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        assert listens(port)
        monkeypatch.setattr(listening, "_NETLINK_SOCK_DIAG", 31)  # no such protocol
        assert not listens(port)


@pytest.mark.parametrize(
    ("address", "elsewhere"),
    [
        ("127.0.0.1", False),
        ("198.51.100.1", True),  # of no machine (RFC 5737)
        ("2001:db8::1", True),
        ("a-name", False),  # not looked up: that may take long
        ("", False),
        ("127.0.0.1\0", False),
    ],
)
def test_whose_address_it_is(address: str, elsewhere: bool) -> None:
    assert listening._elsewhere(address) is elsewhere


@pytest.mark.parametrize(
    ("node", "nodes", "visits"),
    [
        ("1", "2", [0.0025 + 0.005 * i for i in range(60)]),
        ("63", "64", [0.063, 0.127, 0.191, 0.255]),
        ("1", "65", []),
        ("1", "", []),
    ],
)
def test_each_node_has_its_turn_and_those_of_a_large_job_have_none(
    bound: socket.socket,
    far: Path,
    monkeypatch: pytest.MonkeyPatch,
    node: str,
    nodes: str,
    visits: list[float],
) -> None:
    now = [0.0]
    visited: list[float] = []

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def refuse(*_: object) -> bool:
        assert not far.exists()
        visited.append(now[0])
        return False

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(listening, "accepts", refuse)
    monkeypatch.setenv("NODE_RANK", node)
    monkeypatch.setenv("SLURM_NNODES", nodes)
    listening.hold(HEAD_START)
    assert visited == pytest.approx(visits)
    assert now[0] == pytest.approx(HEAD_START if visits else 0.15)
    assert far.exists()


@pytest.mark.usefixtures("where")
def test_rank_0_waits_for_nobody(bound: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one that is rank 0 of a small world, in a replay."""
    monkeypatch.setenv("RANK", "0")
    assert not held(LONG)[0]


def test_the_other_ranks_of_a_node_go_on_with_its_first(
    bound: socket.socket, far: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    bound.listen()
    bound.settimeout(0.0)
    assert held(0.05)[0]
    with pytest.raises(BlockingIOError):
        bound.accept()
    later = threading.Timer(0.05, far.touch)
    later.start()
    assert not held(LONG)[0]
    later.join()


def test_what_may_be_no_store_of_torch_has_no_visitor(
    bound: socket.socket, far: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "visits", False)
    bound.listen()
    bound.settimeout(0.0)
    assert held(0.05)[0]
    assert not held(LONG)[0]  # for its fixed time only
    assert far.exists()
    with pytest.raises(BlockingIOError):
        bound.accept()


def test_a_port_that_does_not_answer_is_waited_for_no_longer(bound: socket.socket) -> None:
    bound.listen(0)
    with socket.create_connection(bound.getsockname()):  # its queue is full
        began = time.monotonic()
        assert not listening.accepts("127.0.0.1", os.environ["MASTER_PORT"], began + 0.1)
        assert time.monotonic() - began < LONG


def test_whatever_happens_the_script_goes_on(
    bound: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "_elsewhere", lambda _address: 1 / 0)
    assert not held(LONG)[0]


TORCH = """
import os, time
import torch.distributed as dist
from robust_slurm.auto import listening
for libuv in (True, False):
    store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False, use_libuv=libuv)
    port, end = str(store.port), time.monotonic() + 60
    assert all(listening.accepts("127.0.0.1", port, end) for _ in range(5))
    rank = dist.TCPStore("127.0.0.1", store.port, 2, False, use_libuv=libuv)
    rank.set("key", "value")
    assert store.get("key") == b"value"
with listening.socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(one.getsockname()[1])}
os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
for method in ("env://", "file://" + os.path.abspath("store")):
    assert not listening.is_used()
    dist.init_process_group("gloo", init_method=method, rank=0, world_size=1)
    assert listening.is_used() == (method == "env://")
    dist.destroy_process_group()
"""


def test_torchs_store_does_not_mind_a_visitor_and_is_known_where_it_is_used(tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    words = [sys.executable, "-W", "ignore", "-c", TORCH]
    ran = subprocess.run(
        words, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("rank", "local", "wait"),
    [(0, 0, 0.0), (1, 1, HEAD_START), (8, 0, HEAD_START)],
)
def test_who_waits_how_long(rank: int, local: int, wait: float) -> None:
    assert head_start(RankStart(local, rank, {})) == wait
