"""All-reduce in one process: bandwidth, wrong sums, and groups that cannot be formed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import DistError  # type: ignore[attr-defined]

from health.active.coordinator.meeting import patience
from health.active.worker import allreduce, collective, sealed
from health.active.worker.collective import listen, local, pair
from health.active.worker.device import WorkerDevice
from health.active.worker.sealed import Sealed
from health.active_tests import Measured

CPU = WorkerDevice("cpu", "cpu")
TASK = {"test": "pair", "seconds": 0.3, "seed": 1, "host": "127.0.0.1", "bytes": 1 << 20}
TASK |= {"secret": "ab" * 16}


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(collective, "SPARE_S", 2.0)
    yield


def together(world: int, **more: Any) -> list[Measured]:
    """Each node of a pair (or more) in a thread."""
    store = listen("127.0.0.1")
    peers = [f"n{rank + 1}" for rank in range(world)]
    task = TASK | {"port": store.port, "world": world, "peers": peers} | more
    found: dict[int, Measured] = {}

    def side(rank: int) -> None:
        (found[rank],) = pair([CPU], task | {"rank": rank}, None if rank else store)

    threads = [threading.Thread(target=side, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[rank] for rank in range(world)]


class Broken:
    """A group whose rank 1 gets one wrong number from each all-reduce of more than one."""

    def __init__(self, group: Any, rank: int) -> None:
        self._group = group
        self._rank = rank

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        work = self._group.allreduce(tensors)
        work.wait()
        if self._rank == 1 and len(tensors[0]) > 1:
            tensors[0][77] += 1
        return work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    real = allreduce._group
    monkeypatch.setattr(
        allreduce, "_group", lambda place, limit: Broken(real(place, limit), place.rank)
    )


@pytest.mark.parametrize("world", [2, 3])
def test_nodes_measure_the_way_between_them(world: int) -> None:
    for one in together(world):
        assert (one.error, one.wrong, len(one.peers)) == ("", (), world)
        algbw = one.values["algbw_gbps"]
        assert 0.001 < algbw < 100
        assert one.values["busbw_gbps"] == pytest.approx(algbw * 2 * (world - 1) / world)


def test_a_nodes_own_devices() -> None:
    (one,) = local([CPU], 0.3, 1)
    assert (one.error, one.wrong) == ("", ())
    assert one.values["busbw_gbps"] == pytest.approx(one.values["algbw_gbps"])


@pytest.mark.usefixtures("broken")
def test_a_wrong_sum_is_wrong_and_says_where() -> None:
    sound, wrong = together(2)
    assert not sound.wrong
    assert "probe 1: rank 1 of 2 (cpu) got" in wrong.wrong[0]
    assert " at 77 " in wrong.wrong[0]
    assert "1 of 262144 numbers" in wrong.wrong[0]
    assert len(wrong.wrong) <= 4
    assert not wrong.error


@pytest.mark.usefixtures("broken")
def test_a_wrong_sum_between_a_nodes_own_devices() -> None:
    (one,) = local([CPU], 0.2, 1)
    assert one.wrong


@pytest.mark.usefixtures("short")
def test_a_peer_that_never_comes_is_an_error_in_time() -> None:
    store = listen("127.0.0.1")
    task = TASK | {"port": store.port, "world": 2, "peers": ["n1", "n2"], "rank": 0}
    begin = time.monotonic()
    (one,) = pair([CPU], task, store)
    assert time.monotonic() - begin < patience(0.3), "the coordinator waits no longer"
    assert one.error == "peer n2 did not come within 1.3 s"
    assert (one.wrong, one.values) == ((), {})


@pytest.mark.usefixtures("short")
def test_a_listener_that_is_not_there_is_an_error_in_time() -> None:
    with socket.socket() as held:  # nobody else listens there meanwhile
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        task = TASK | {"port": port, "world": 2, "peers": ["n1", "n2"], "rank": 1}
        begin = time.monotonic()
        (one,) = pair([CPU], task, None)
    assert time.monotonic() - begin < patience(0.3), "the coordinator waits no longer"
    assert f"peer n1, which listens at 127.0.0.1 port {port}, could not be reached" in one.error
    assert not one.wrong


@pytest.mark.usefixtures("short")
def test_a_peer_that_goes_away_meanwhile_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = allreduce._Rank._plan

    def plan(rank: Any, probe: float) -> tuple[int, int]:
        if rank._member.rank == 1:
            raise OSError("gone")
        return real(rank, probe)

    monkeypatch.setattr(allreduce._Rank, "_plan", plan)
    left, gone = together(2)
    assert left.error and not left.wrong and not left.values
    assert gone.error == "OSError: gone"


@pytest.mark.usefixtures("short")
def test_a_rank_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    until = threading.Event()
    monkeypatch.setattr(allreduce._Rank, "_plan", lambda *args: until.wait(30))
    (one,) = local([CPU], 0.2, 1)
    until.set()
    assert "2 of 2 ranks here had not finished at the time limit" in one.error
    assert not one.wrong


def test_what_the_device_says_of_itself_is_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(rank: Any, probe: float) -> tuple[int, int]:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr(allreduce._Rank, "_plan", plan)
    (one,) = local([CPU], 0.2, 1)
    assert "uncorrectable ECC" in one.wrong[0]


@pytest.mark.usefixtures("short")
def test_nodes_with_and_without_gpus_are_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter(["gloo", "nccl"])
    monkeypatch.setattr(collective, "backend", lambda devices: next(said))
    found = together(2)
    assert any("a node with GPUs and one without cannot be paired" in one.error for one in found)
    assert not any(one.wrong for one in found)


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ({"rank": 2, "world": 2, "peers": ["a", "b"]}, "does not fit"),
        ({"rank": 1, "world": 2, "peers": ["a"]}, "does not fit"),
        ({"rank": 0, "world": 2, "peers": ["a", "b"]}, "asked to listen"),
    ],
)
def test_a_task_that_does_not_fit_is_an_error(task: dict[str, Any], why: str) -> None:
    (one,) = pair([CPU], TASK | {"port": 1} | task, None)
    assert why in one.error


def test_slow_ways_get_smaller_messages() -> None:
    place = allreduce.GroupMember(0, 2, CPU, collective.HashStore())
    work = allreduce.Work(64 << 20, 2.0, 1, 5.0)
    for probe, size, times in [(1e-4, 64 << 20, 312), (1.0, 1 << 20, 3), (0.05, 13981013, 3)]:
        count, planned = allreduce._Rank(place, work, None, [])._plan(probe)
        assert abs(count * 4 - size) < 4
        assert abs(planned - times) <= 1


@pytest.mark.slow
def test_a_stranger_at_the_store_aborts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody on the network may connect to torch's store, which knows no password."""
    real = allreduce._Rank._plan
    ports: list[int] = []
    listens = collective.TCPStore

    def plan(rank: Any, probe: float) -> tuple[int, int]:
        if rank._member.rank == 0:
            stranger = listens("127.0.0.1", ports[0], is_master=False, wait_for_workers=False)
            for key in ("plan", "here/0", "group/0", "done/1"):
                stranger.set(key, "[1e99, 0]")
            time.sleep(10 * sealed._POLL_S)  # the others look meanwhile, each so often
        return real(rank, probe)

    def listening(host: str) -> Any:
        store = listens(host, 0, is_master=True, wait_for_workers=False)
        ports.append(store.port)
        return store

    monkeypatch.setattr(allreduce._Rank, "_plan", plan)
    monkeypatch.setitem(globals(), "listen", listening)
    for one in together(2):
        assert (one.error, one.wrong) == ("", ())


def test_what_does_not_verify_is_not_there() -> None:
    store = listen("127.0.0.1")
    ours, theirs = Sealed(store, b"a" * 16), Sealed(store, b"b" * 16)
    ours.set("plan", "[1, 2]")
    assert ours.get("plan") == b"[1, 2]"
    with pytest.raises(DistError):
        theirs.wait(["plan"], timedelta(seconds=0.1))
    for key in store.list_keys() if hasattr(store, "list_keys") else ():
        for forged in ("junk", b"[1e99, 0]".rjust(64, b"0").hex()):  # found, and written over
            store.set(key, forged)
            with pytest.raises(DistError, match="stranger"):
                ours.wait(["plan"], timedelta(seconds=0.1))
    ours.set("plan", b"again")
    assert ours.get("plan") == b"again"
