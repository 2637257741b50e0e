"""Slurm's commands of one release against the slurmctld of another, as while a site upgrades.

Slurm answers clients that are up to three releases older (before 24.11 two), and none that is
newer. The roots of the other releases are the lab's.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from lab.errors import LabError
from lab.slurm import releases
from lab.slurm.controller import Controller
from robust_slurm.slurm import Slurm, SlurmError

pytestmark = pytest.mark.cluster
DEADLINE_S = 20.0
ANSWERED = {("24.11", "26.05")}  # commands, slurmctld


@pytest.mark.parametrize("server", list(releases.SUITES))
def test_commands_of_another_release(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command does what it is asked, or names the versions in one error; none does half."""
    if why := next(filter(None, map(releases.why_not, releases.SUITES)), ""):
        pytest.skip(why)
    try:
        alone = Controller(nodes=4, slurm=server)
    except LabError as error:
        pytest.skip(str(error))
    with alone:
        own = Slurm(deadline_s=DEADLINE_S, environ={**os.environ, **alone.env})
        for client in releases.SUITES:
            if client == server:
                continue
            env = alone.clients(releases.find(client))
            other = Slurm(deadline_s=DEADLINE_S, environ={**os.environ, **env}, ping_first=True)
            with monkeypatch.context() as patch:
                patch.setenv("PATH", env["PATH"])
                found = {what: _said(call) for what, call in _calls(other).items()}
            answered = (client, server) in ANSWERED
            kinds = dict.fromkeys(found, "" if answered else "version")
            assert found == kinds, f"commands of {client} against {server}"
            assert ("DRAIN" in own.nodes()["c1"].state) is answered
            assert bool(own.job_states()) is answered


def _calls(slurm: Slurm) -> dict[str, Callable[[], object]]:
    return {
        "nodes": slurm.nodes,
        "drain": lambda: slurm.drain("c1", "fan"),
        "submit": lambda: slurm.submit("#!/bin/sh\nsleep 60\n", args=["-w", "c2"]),
    }


def _said(call: Callable[[], object]) -> str:
    """Return the kind of the call's error; "": it had none."""
    try:
        call()
    except SlurmError as error:
        return error.kind
    return ""
