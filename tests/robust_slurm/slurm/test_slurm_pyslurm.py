"""The way to Slurm by pyslurm, with a pyslurm that fails as the real one does."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

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
    available_features, reason, reason_user, reason_time = ["fast"], "robust: x", "root", 17
    def __init__(self, name=None, **changes):
        pass
    def modify(self, changes):
        {order}

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


class Commands:
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
        commands: Commands,
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
    large = Commands(PAYS_FROM)
    slurm = opened(large)
    node = slurm.nodes()["n1"]
    assert node.state == {"IDLE", "DRAIN"} and node.gres == "gpu:h100:4"
    assert (node.reason, node.reason_by, node.reason_time) == ("robust: x", "root", 17.0)
    assert slurm.backend() == ("pyslurm", "pyslurm 24.11.0")
    assert not any("show node" in call for call in large.calls)

    small = Commands(PAYS_FROM - 1)
    slurm = opened(small)
    assert slurm.nodes()["n1"].state == {"IDLE"}
    assert "version" not in " ".join(small.calls)  # no process was started
    assert slurm.backend()[0] == "commands" and "fits, but" in slurm.backend()[1]


def test_orders_go_by_pyslurm_once_its_process_runs(opened: Opener) -> None:
    commands = Commands(PAYS_FROM)
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
        ({"load": FATAL}, "ended the process: fatal: Could not establish a configuration source"),
        ({"version": "25.05.0"}, "newer than the Slurm 24.11 of this machine"),
        ({"version": "?"}, "its version is"),
        ({"load": "import os; os._exit(3)"}, "it died"),
        ({"load": OLD}, "23.11 or later is needed"),
        ({"load": "return {'n1': object()}"}, "AttributeError"),
        ({"load": "raise RPCError('Insane message length')"}, "does not fit this slurmctld"),
    ],
)
def test_without_a_pyslurm_that_works_commands_are_used(
    opened: Opener, fake: dict[str, str], why: str
) -> None:
    slurm = opened(Commands(PAYS_FROM), **fake)
    assert slurm.nodes()["n1"].state == {"IDLE"}  # the commands' answer
    assert slurm.backend()[0] == "commands" and why in slurm.backend()[1]
    assert slurm.nodes()["n1"].state == {"IDLE"}
    with pytest.raises(SlurmError) as caught:
        opened(Commands(1), required=True, **fake).nodes()
    assert caught.value.kind == "other" and why in caught.value.message
    assert "slurm_backend = auto" in caught.value.hint


def test_slurms_refusals_keep_their_kind(opened: Opener) -> None:
    slurm = opened(Commands(1), required=True, order="raise RPCError('Access/permission denied')")
    with pytest.raises(SlurmError) as caught:
        slurm.requeue(7)
    assert caught.value.kind == "denied"


def test_a_late_answer_is_a_timeout_and_the_next_call_works(opened: Opener) -> None:
    slurm = opened(Commands(1), required=True, order="time.sleep(60)")
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
    commands = Commands(PAYS_FROM)
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


@pytest.mark.skipif(find_spec("pyslurm") is not None, reason="pyslurm is installed here")
def test_pyslurm_is_required_and_not_installed() -> None:
    assert type(connect("auto")) is Slurm
    assert "is not installed" in connect("auto").backend()[1]
    with pytest.raises(SlurmError, match="not installed") as caught:
        connect("pyslurm")
    assert caught.value.kind == "invalid"
