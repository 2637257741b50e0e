"""The way to Slurm by pyslurm, with a pyslurm that fails as the real one does."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from robust_slurm.slurm import Completed, Slurm, SlurmError
from robust_slurm.slurm.by_pyslurm import PAYS_FROM, PySlurm
from robust_slurm.slurm.child import COMMAND
from robust_slurm.slurm.choose import connect

FAKE = """\
import time
__version__ = {version!r}

class RPCError(Exception):
    pass

class Node:
    name, hostname, slurmd_port, state = "n1", "n1", 6818, "IDLE+DRAIN"
    partitions, configured_gres, total_cpus, comment = ["train"], {{"gpu:h100": 4}}, 8, None
    available_features, reason, reason_time = ["fast"], "robust: x", 17
    def __init__(self, name=None, **changes):
        pass
    def modify(self, changes):
        {order}

class Odd(Node):
    @property
    def comment(self):
        raise UnicodeDecodeError("utf-8", b"x", 0, 1, "invalid start byte")

class Nodes:
    @staticmethod
    def load():
        {load}

class Job:
    def __init__(self, number):
        pass
    def requeue(self):
        {order}
"""
GOOD = 'return {"n1": Node()}'
FATAL = "import os; os.write(2, b'fatal: Could not establish a configuration source'); os._exit(1)"
OLD = '__version__ = "22.5.3"'
LATE_S = 5.0


class Scontrol:
    """Slurm's commands: slurmctld is there, with so many nodes."""

    def __init__(self, nodes: int, release: str = "24.11.5") -> None:
        self.nodes = nodes
        self.release = release
        self.calls: list[str] = []

    def __call__(
        self,
        argv: Sequence[str],
        deadline_s: float,
        input: str | None,
        env: Mapping[str, str],
        cwd: Path | None,
    ) -> Completed:
        words = " ".join(argv)
        self.calls.append(words)
        if "version" in words:
            return Completed(0, f"slurm-wlm {self.release}\n", "")
        if "ping" in words:
            return Completed(0, "Slurmctld(primary) at head is UP\n", "")
        if "partition" in words:
            return Completed(0, f"PartitionName=train TotalNodes={self.nodes}\n", "")
        if "show node" in words:
            return Completed(0, "NodeName=n1 State=IDLE Partitions=train\n", "")
        return Completed(0, "", "")


Opener = Callable[..., PySlurm]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    clients: list[PySlurm] = []

    def client(
        commands: Scontrol,
        *,
        version: str = "24.11.0",
        load: str = GOOD,
        order: str = "pass",
        required: bool = False,
        deadline_s: float = 30.0,
    ) -> PySlurm:
        text = FAKE.format(version=version, load=load, order=order)
        (tmp_path / "pyslurm.py").write_text(load if load in (FATAL, OLD) else text)
        start = (
            f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r});"
            f"runpy.run_path({COMMAND[-1]!r}, run_name='__main__')"
        )
        argv = [sys.executable, "-I", "-c", start]
        clients.append(PySlurm(commands, deadline_s, {}, required=required, argv=argv))
        return clients[-1]

    yield client
    for each in clients:
        each.close()


def test_a_large_cluster_is_read_by_pyslurm_a_small_one_by_commands(opened: Opener) -> None:
    large = Scontrol(PAYS_FROM)
    slurm = opened(large)
    node = slurm.nodes()["n1"]
    assert node.state == {"IDLE", "DRAIN"} and node.gres == "gpu:h100:4"
    assert (node.reason, node.reason_time) == ("robust: x", 17.0)
    assert slurm.backend() == ("pyslurm", "pyslurm 24.11.0")
    assert not any("show node" in call for call in large.calls)

    small = Scontrol(PAYS_FROM - 1)
    slurm = opened(small)
    assert slurm.nodes()["n1"].state == {"IDLE"}
    assert "version" not in " ".join(small.calls)  # no process was started
    assert slurm.backend()[0] == "commands" and "fits, but" in slurm.backend()[1]


def test_orders_go_by_pyslurm_once_its_process_runs(opened: Opener) -> None:
    commands = Scontrol(PAYS_FROM)
    slurm = opened(commands)
    slurm.requeue(7)
    assert "scontrol requeue 7" in commands.calls
    slurm.nodes()
    before = len(commands.calls)
    slurm.requeue(8)
    slurm.requeue("9_1")
    assert commands.calls[before:] == ["scontrol requeue 9_1"]


@pytest.mark.parametrize(
    ("fake", "why"),
    [
        (
            {"load": FATAL},
            "its process ended with exit code 1: fatal: Could not establish a configuration source",
        ),
        ({"version": "25.05.0"}, "newer than the Slurm 24.11 of this machine"),
        ({"version": "?"}, "its version is"),
        ({"load": "import os; os._exit(3)"}, "its process ended with exit code 3"),
        ({"load": "import os; os.kill(os.getpid(), 9)"}, "its process ended with signal 9"),
        ({"load": OLD}, "23.11 or later is needed"),
        ({"load": "return {'n1': object()}"}, "AttributeError"),
        ({"load": "raise RPCError('Insane message length')"}, "does not fit this slurmctld"),
        ({"load": "Node.cpus = 1; Node.name = None; " + GOOD}, "a node without a name"),
        ({"load": "Node.total_cpus = float('inf'); " + GOOD}, "OverflowError"),
        ({"load": "Node.partitions = 7; " + GOOD}, "TypeError"),
        ({"load": "Node.state = {1, 2}; " + GOOD}, "not JSON serializable"),
    ],
)
def test_without_a_pyslurm_that_works_commands_are_used(
    opened: Opener, fake: dict[str, str], why: str
) -> None:
    slurm = opened(Scontrol(PAYS_FROM), **fake)
    assert slurm.nodes()["n1"].state == {"IDLE"}  # the commands' answer
    assert slurm.backend()[0] == "commands" and why in slurm.backend()[1]
    assert slurm.nodes()["n1"].state == {"IDLE"}
    with pytest.raises(SlurmError) as caught:
        opened(Scontrol(1), required=True, **fake).nodes()
    skewed = "newer" in why or "does not fit" in why
    assert caught.value.kind == ("version" if skewed else "other")
    assert why in caught.value.message and "slurm_backend = auto" in caught.value.hint
    assert slurm._child._process is None  # nothing is kept that is of no use


def test_slurms_refusals_keep_their_kind(opened: Opener) -> None:
    slurm = opened(Scontrol(1), required=True, order="raise RPCError('Access/permission denied')")
    with pytest.raises(SlurmError) as caught:
        slurm.requeue(7)
    assert caught.value.kind == "denied"


def test_a_late_answer_is_a_timeout_and_the_next_call_works(opened: Opener) -> None:
    slurm = opened(Scontrol(1), required=True, order="time.sleep(60)")
    slurm.nodes()
    slurm._deadline_s = 0.5
    began = time.monotonic()
    with pytest.raises(SlurmError) as caught:
        slurm.requeue(7)
    assert caught.value.kind == "timeout" and "may have been carried out" in caught.value.message
    assert time.monotonic() - began < LATE_S
    slurm._deadline_s = 30.0
    assert slurm.nodes()


def test_an_order_that_may_be_done_is_not_given_again(opened: Opener) -> None:
    commands = Scontrol(PAYS_FROM)
    slurm = opened(commands, order="import os; os._exit(3)")
    slurm.nodes()
    with pytest.raises(SlurmError) as caught:
        slurm.requeue(7)
    assert caught.value.kind == "timeout"
    assert not any("requeue" in call for call in commands.calls)
    slurm.requeue(8)  # from now on by the commands
    assert commands.calls[-1] == "scontrol requeue 8"

    slurm = opened(commands, order="import os; os._exit(3)", required=True)
    with pytest.raises(SlurmError) as caught:
        slurm.requeue(9)
    assert caught.value.kind == "timeout"
    with pytest.raises(SlurmError, match="cannot be used"):
        slurm.requeue(10)


def test_an_order_that_cannot_have_been_sent_goes_by_commands(opened: Opener) -> None:
    commands = Scontrol(PAYS_FROM)
    slurm = opened(commands)
    slurm.nodes()
    process = slurm._child._process
    assert process is not None
    process.kill()  # as the kernel does, short of memory
    process.wait()
    slurm.requeue(7)
    assert commands.calls[-1] == "scontrol requeue 7"
    assert "ended with signal 9" in slurm.backend()[1]


def test_an_order_that_slurm_does_not_understand_is_given_once(opened: Opener) -> None:
    commands = Scontrol(PAYS_FROM)
    slurm = opened(commands, order="raise RPCError('Zero Bytes were transmitted or received')")
    slurm.nodes()
    with pytest.raises(SlurmError) as caught:
        slurm.requeue(7)
    assert caught.value.kind == "version" and "pyslurm 24.11.0 does not fit" in str(caught.value)
    slurm.requeue(8)
    assert [call for call in commands.calls if "requeue" in call] == ["scontrol requeue 8"]

    slurm = opened(commands, order="raise RPCError('Zero Bytes were transmitted or received')")
    slurm.nodes()
    slurm._set_node("n1", {"State": "UNDRAIN"}, time.monotonic() + 30)  # twice is as once
    assert commands.calls[-1] == "scontrol update NodeName=n1 State=UNDRAIN"


def test_what_is_no_job_is_refused_before_it_is_asked_for(opened: Opener) -> None:
    slurm = opened(Scontrol(1), required=True)
    with pytest.raises(SlurmError) as caught:
        slurm.requeue(-1)
    assert caught.value.kind == "invalid"


def test_one_odd_node_hides_no_other(opened: Opener) -> None:
    slurm = opened(Scontrol(PAYS_FROM), load="return {'n1': Odd()}")
    node = slurm.nodes()["n1"]
    assert slurm.backend()[0] == "pyslurm"
    assert (node.reason, node.comment) == ("robust: x", "(not UTF-8)")


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([[1, 0]], "ValueError"),
        ([["1", 0, "root", "RUNNING", "train", "n1"]], "job '1'"),
        ([7], "TypeError"),
        (None, "TypeError"),
        ({"a": 1}, "ValueError"),
    ],
)
def test_jobs_of_another_shape_are_not_read(opened: Opener, rows: Any, why: str) -> None:
    """A program of another release, put there by an upgrade, may write them."""
    slurm = opened(Scontrol(1), required=True)
    slurm._child.ask = lambda request, until: rows  # type: ignore[method-assign]
    with pytest.raises(SlurmError) as caught:
        slurm.job_states()
    assert caught.value.kind == "other" and why in caught.value.message
    assert "its jobs cannot be read" in caught.value.message


def test_the_release_is_asked_for_within_the_deadline(opened: Opener) -> None:
    class Slow(Scontrol):
        def __call__(self, argv: Sequence[str], deadline_s: float, *more: Any) -> Completed:
            if "version" in argv:
                left.append(deadline_s)
            return super().__call__(argv, deadline_s, *more)

    left: list[float] = []
    opened(Slow(1), required=True, deadline_s=20.0).nodes()
    assert left and left[0] < 20.0


@pytest.mark.skipif(find_spec("pyslurm") is not None, reason="pyslurm is installed here")
def test_pyslurm_is_required_and_not_installed() -> None:
    assert type(connect("auto")) is Slurm
    assert "is not installed" in connect("auto").backend()[1]
    with pytest.raises(SlurmError, match="not installed") as caught:
        connect("pyslurm")
    assert caught.value.kind == "invalid"
