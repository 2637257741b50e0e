"""Workers as real processes, by a coordinator that is not the product's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from active_coordinator import Coordinator

from health.active.worker.env import interface_of, prepare, take_environment
from health.active_tests import measured

pytestmark = pytest.mark.slow

WRONG_TORCH = "raise ImportError('libcudart.so.12: cannot open shared object file')\n"


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    made = Coordinator()
    yield made
    made.close()


def one(answer: dict[str, Any]) -> Any:
    (found,) = answer["measured"]
    return measured(found)


def gone(worker: subprocess.Popen[bytes], within: float = 10.0) -> int:
    return worker.wait(within)


def test_a_worker_says_who_it_is_and_does_what_it_is_told(coordinator: Coordinator) -> None:
    worker = coordinator.start("n1", ROBUST_TEST_LOCAL="3")
    peer = coordinator.accept()
    assert peer.next() == {"hello": {"node": "n1", "local": 3, "pid": worker.pid}}
    ready = peer.next()["ready"]
    assert ready["backend"] == "gloo"
    assert (ready["devices"], ready["models"], ready["host"]) == (["cpu"], ["cpu"], "127.0.0.1")

    found = one(peer.ask(test="gemm", level="quick", seconds=0.2, seed=1))
    assert (found.test, found.node, found.device, found.model) == ("gemm", "n1", "cpu", "cpu")
    assert found.values["fp32_tflops"] > 0
    assert 0.1 < found.seconds < 60
    found = one(peer.ask(test="bitwise", level="quick", seconds=0.0, seed=1))
    assert [key.split("/")[0] for key in found.digests] == ["dense", "moe"]
    assert (
        one(peer.ask(test="memory", level="quick", seconds=0.1, seed=1)).values["memory_gbps"] > 0
    )
    assert one(peer.ask(test="local", level="quick", seconds=0.1, seed=1)).values["busbw_gbps"] > 0
    assert "needs CUDA" in one(peer.ask(test="links", level="quick", seconds=0.1)).error

    found = one(peer.ask(test="burn", level="quick"))
    assert (found.test, found.node) == ("burn", "n1")
    assert "no such test" in found.error
    assert "level 'brief' is none of" in one(peer.ask(test="gemm", level="brief")).error
    assert "KeyError" in one(peer.ask(test="pair", level="quick")).error
    peer.send({"quit": True})
    assert gone(worker) == 0


def test_two_workers_meet_and_one_that_never_comes_is_an_error(coordinator: Coordinator) -> None:
    first, second = coordinator.worker("n1"), coordinator.worker("n2")
    task: dict[str, Any] = {
        "test": "pair", "level": "quick", "seconds": 0.5, "seed": 1, "host": "127.0.0.1",
        "world": 2, "peers": ["n1", "n2"], "bytes": 1 << 20, "secret": "ab" * 16,
    }  # fmt: skip
    for _ in range(2):  # a pair after another, with other stores
        task["port"] = first.ask(test="listen")["port"]
        first.begin(**task, rank=0)
        second.begin(**task, rank=1)
        for found in (one(first.answer()), one(second.answer())):
            assert (found.error, found.wrong, found.peers) == ("", (), ("n1", "n2"))
            assert 0.001 < found.values["busbw_gbps"] < 100
    task["port"] = first.ask(test="listen")["port"]
    found = one(first.ask(**task, rank=0))
    assert found.error.startswith("peer n2 did not come within")
    assert not found.wrong
    assert one(first.ask(test="bitwise", seconds=0.0)).digests  # it goes on


def test_without_torch_a_worker_is_unable(coordinator: Coordinator, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(WRONG_TORCH)
    path = f"{tmp_path}:{coordinator.env('')['PYTHONPATH']}"
    worker = coordinator.start("n1", PYTHONPATH=path)
    peer = coordinator.accept()
    assert "hello" in peer.next()
    assert peer.next()["unable"] == (
        "torch cannot be imported: ImportError: libcudart.so.12: cannot open shared object file; "
        f"install it for {sys.executable}, or name the job's own Python"
    )
    assert gone(worker) == 0


def test_a_worker_ends_with_its_connection_in_the_middle_of_a_test(
    coordinator: Coordinator,
) -> None:
    peer = coordinator.worker("n1")
    peer.begin(test="gemm", level="quick", seconds=300.0)
    peer.socket.close()
    gone(coordinator.workers[0])


def test_a_worker_whose_coordinator_is_silent_ends(coordinator: Coordinator) -> None:
    worker = coordinator.start("n1", ROBUST_TEST_LIFE="1")
    coordinator.accept()
    assert gone(worker) == -signal.SIGALRM


def test_a_worker_ends_with_its_parent(coordinator: Coordinator, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(300)")
    path = f"{tmp_path}:{coordinator.env('')['PYTHONPATH']}"
    program = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-P', '-m', "
        "'health.active.worker.main']); time.sleep(300)"
    )
    env = coordinator.env("n1") | {"PYTHONPATH": path}
    parent = subprocess.Popen([sys.executable, "-c", program], env=env)
    try:
        peer = coordinator.accept()
        assert "hello" in peer.next()
    finally:
        parent.kill()
        parent.wait()
    with pytest.raises((EOFError, ConnectionError)):
        peer.next()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ROBUST_TEST_SERVER": "nowhere"}, "must be host:port"),
        ({"ROBUST_TEST_NODE": ""}, "must name this node"),
        ({"ROBUST_TEST_KEY": "secret"}, "must be hex"),
        ({"ROBUST_TEST_KEY": "00"}, "must be hex"),
        ({"ROBUST_TEST_LIFE": "-1"}, "above 0"),
    ],
)
def test_a_bad_environment_is_refused(
    coordinator: Coordinator, wrong: dict[str, str], said: str
) -> None:
    worker = coordinator.start("n1", **wrong)
    output, _ = worker.communicate(timeout=30)
    assert worker.returncode == 2
    assert said in output.decode()
    assert b"secret" not in output


def test_a_coordinator_that_is_not_there_is_told(coordinator: Coordinator) -> None:
    worker = coordinator.start("n1", ROBUST_TEST_SERVER="127.0.0.1:1")
    output, _ = worker.communicate(timeout=30)
    assert worker.returncode == 1
    assert b"on n1: the coordinator at 127.0.0.1 port 1 cannot be reached" in output


def test_secrets_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROBUST_TEST_SERVER", "[::1]:5")
    monkeypatch.setenv("ROBUST_TEST_KEY", "ab" * 32)
    monkeypatch.setenv("ROBUST_TEST_NODE", "n1")
    started = take_environment()
    assert (started.host, started.port, started.key) == ("::1", 5, b"\xab" * 32)
    assert "ROBUST_TEST_KEY" not in os.environ
    assert "ROBUST_TEST_SERVER" not in os.environ


def test_what_changes_bits_is_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"NVIDIA_TF32_OVERRIDE": "1", "OMP_NUM_THREADS": "1"})
    prepare("127.0.0.1")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert not {"NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS"} & set(os.environ)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth7"
    prepare("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_as_many_open_files_as_may_be() -> None:
    code = (
        "import resource as r; from health.active.worker.env import prepare; "
        "r.setrlimit(r.RLIMIT_NOFILE, (64, 128)); prepare('127.0.0.1'); "
        "print(r.getrlimit(r.RLIMIT_NOFILE))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "(128, 128)\n"


@pytest.mark.parametrize(
    "name",
    ["NCCL_P2P_DISABLE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "CUDA_LAUNCH_BLOCKING"],
)
def test_what_changes_speeds_is_not_taken_over(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(os, "environ", {name: "1", "NCCL_SOCKET_IFNAME": "ib0"})
    prepare("127.0.0.1")
    assert name not in os.environ and os.environ["NCCL_SOCKET_IFNAME"] == "ib0"


def test_interfaces_by_their_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") == ""
    if Path("/proc/net/if_inet6").exists():
        lines = Path("/proc/net/if_inet6").read_text()
        assert interface_of("::1") == ("lo" if f"{1:032x}" in lines else "")
        assert interface_of("2001:db8::7%eth0") == ""


def test_importing_the_worker_does_not_import_torch() -> None:
    program = (
        "import sys, json, health.active.worker.main; print(json.dumps('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert json.loads(done.stdout) is False


def test_quitting_takes_no_time(coordinator: Coordinator) -> None:
    peer = coordinator.worker("n1")
    begin = time.monotonic()
    peer.send({"quit": True})
    gone(coordinator.workers[0])
    assert time.monotonic() - begin < 5
