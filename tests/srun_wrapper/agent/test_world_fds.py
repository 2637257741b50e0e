"""The descriptor of srun --mpi=pmi2: the ranks of the first start have it, and no later ones.

No MPI library is needed: the rank speaks PMI's own words with this test in place of slurmstepd.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import pytest
import slot_driver

from srun_wrapper.agent.launch import world_fds
from srun_wrapper.protocol.messages import Exited, Start

drivers, drive = slot_driver.drivers, slot_driver.drive

INIT = """
import os, socket, sys
line = socket.socket(fileno=int(os.environ["PMI_FD"]))
line.sendall(b"cmd=init pmi_version=2 pmi_subversion=0\\n")
sys.exit(0 if line.recv(100).startswith(b"cmd=response_to_init") else 3)
"""


def order(first: bool) -> Start:
    return Start(1 if first else 2, {}, (), 0.0, 0, first, 1, "127.0.0.1", 29500)


@pytest.mark.parametrize("text", ["", "x", "-1", "1e3", "987654"])
def test_what_is_no_descriptor_of_ours(text: str) -> None:
    assert world_fds(order(True), {"PMI_FD": text} if text else {}) == ()


def test_only_the_first_start_has_it() -> None:
    with socket.socket() as open_one:
        env = {"PMI_FD": str(open_one.fileno())}
        assert world_fds(order(True), env) == (open_one.fileno(),)
        assert world_fds(order(False), env) == ()


@pytest.mark.parametrize("inherit", [False, True], ids=["own streams", "--pty"])
def test_a_rank_speaks_with_its_server(
    drive: Any, monkeypatch: pytest.MonkeyPatch, inherit: bool
) -> None:
    server, task = socket.socketpair()
    with server, task:
        monkeypatch.setenv("PMI_FD", str(task.fileno()))
        monkeypatch.setattr(slot_driver.subprocess, "Popen", passing(task.fileno()))
        driver = drive(sys.executable, "-c", INIT, inherit=inherit)
        driver.start()
        server.settimeout(10)
        assert server.recv(100) == b"cmd=init pmi_version=2 pmi_subversion=0\n"
        server.sendall(b"cmd=response_to_init pmi_version=2 pmi_subversion=0 rc=0\n")
        assert driver.get(Exited).code == 0, driver.stderr()
        driver.start(2)
        assert driver.get(Exited).code == 1 and "Bad file descriptor" in driver.stderr()


def passing(descriptor: int) -> Any:
    """Return a Popen whose children have the descriptor as well, like a task of slurmstepd."""
    real = slot_driver.subprocess.Popen

    def popen(*words: Any, pass_fds: list[int], **more: Any) -> Any:
        os.set_inheritable(descriptor, True)
        return real(*words, pass_fds=[*pass_fds, descriptor], **more)

    return popen
