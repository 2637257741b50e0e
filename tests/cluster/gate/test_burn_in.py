"""robust-health burn-in on a real Slurm: torch on CPUs, reservations, drains and records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from admin_prefix import packages_of
from gate_lab import FREE, GateLab, gate_lab
from places import PROGRAMS
from waiting import until

from robust_slurm import commands

pytest.importorskip("torch")

LIMIT = 150.0  # s; importing torch on every node, on few cores, is most of it
WRONG = PROGRAMS / "wrong"
BRIEF = {"LAB_BRIEF": "1"}  # each test for a tenth of its time
ODD = """import os, runpy, sys
cases = {cases!r}
found = cases.get(os.environ.get("SLURMD_NODENAME"), cases["*"])
if "NO_TORCH" in found:
    sys.path.insert(0, found["NO_TORCH"])
os.environ.update(found)
runpy.run_path({wrong!r} + "/sitecustomize.py")
"""


@pytest.fixture(scope="module")
def made() -> Iterator[GateLab]:
    with gate_lab(nodes=4, gpus=2) as site:
        yield site


@pytest.fixture
def site(made: GateLab) -> Iterator[GateLab]:
    made.settings(more=f'[active]\npython = "{odd_python(made)}"\n')
    yield made
    assert reservations(made) == "", "whatever happens, it is removed"
    made.mend()


def python(site: GateLab) -> Path:
    return site.etc.parent / "prefix" / "bin" / "python3"


def odd_python(site: GateLab, **env: dict[str, str]) -> str:
    """Make an environment for nodes by name: what their Python has in its variables. On others
    tests are brief. Root takes no wrapper script in its place."""
    packages = packages_of(site.etc.parent / "odd")
    python = site.etc.parent / "odd" / "bin" / "python3"
    if not python.exists():
        packages.mkdir(parents=True)
        python.parent.mkdir()
        base = Path(os.path.realpath(sys.executable))
        python.symlink_to(base)
        (site.etc.parent / "odd" / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
        own = packages_of(site.etc.parent / "prefix")
        (packages / "odd.pth").write_text(
            f"{own}\n{sysconfig.get_path('purelib')}\nimport odd_here\n"
        )
    cases = env | {"*": BRIEF}
    (packages / "odd_here.py").write_text(ODD.format(cases=cases, wrong=str(WRONG)))
    return str(python)


def argv(site: GateLab, *words: str) -> list[str]:
    head = [str(python(site)), "-I", *commands.words("health.cli"), "burn-in", "--level", "quick"]
    return [*head, "--config", str(site.etc / "robust.toml"), *words]


def burn_in(site: GateLab, *words: str) -> subprocess.CompletedProcess[str]:
    return site.lab.exec("head", argv(site, *words), user=False, timeout=LIMIT)


def reservations(site: GateLab) -> str:
    done = site.lab.exec("head", ["scontrol", "-o", "show", "reservation"], user=False)
    return "" if "No reservations" in done.stdout else done.stdout


def of(site: GateLab, node: str) -> dict[str, Any]:
    """The newest burn-in in the ledger."""
    return dict(site.shared(node, "burn-in")[-1].data)


def test_healthy_nodes_pass_and_it_is_recorded(site: GateLab) -> None:
    done = burn_in(site, "n[1-3]", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["cleared"] == ["n1", "n2", "n3"] and found["named"] == {}
    tested = {one["test"] for one in found["measured"]}
    assert {"bitwise", "gemm", "memory", "pair"} <= tested
    # The GPUs are emulated: the step for NVIDIA's tools sees them, torch does not.
    for line in ("dcgmi diag -r 1: dcgmi is not installed", "nccl-tests: not installed"):
        assert line in found["left_out"], found["left_out"]
    for node in ("n1", "n2", "n3"):
        known = of(site, node)
        assert (known["level"], known["ok"], known["result"]) == ("quick", True, "passed")
        assert set(known["ran"]) == tested
        assert {e.data["test"] for e in site.shared(node, "active")} == tested
        site.wait_node(node, *FREE)
    assert site.shared("n4", "burn-in", "active") == []
    site.sweep("n1")
    assert site.local("n1", "burn-in") == site.shared("n1", "burn-in"), "the node knows it, too"


def test_one_that_computes_wrongly_and_one_where_torch_cannot_start(site: GateLab) -> None:
    """The first is drained before a job can come, the second is not tested, and not blamed."""
    switch = site.lab.shared / "wrong"
    switch.touch()
    broken = site.etc.parent / "no-torch"
    broken.mkdir(exist_ok=True)
    (broken / "torch.py").write_text('raise ImportError("libcudart.so.12 is not here")\n')
    odd = odd_python(
        site,
        n2={"NO_TORCH": str(broken)},
        n3={**BRIEF, "LAB_WRONG": "flip", "LAB_WRONG_NODE": "n3", "LAB_WRONG_FILE": str(switch)},
    )
    done = burn_in(site, "n[1-4]", "--python", odd)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "could not test n2" in done.stdout and "libcudart.so.12 is not here" in done.stdout
    assert of(site, "n2")["result"] == "untested"
    assert "n3 is bad: " in done.stdout
    assert site.reason("n3").startswith("robust:node:active-")
    assert site.others("n3") == {}
    assert of(site, "n3")["result"] == "failed"
    assert of(site, "n1")["ok"] is True and of(site, "n4")["ok"] is True
    (drain,) = site.shared("n3", "drain")
    assert drain.data["placed"] and drain.boot == ""
    site.sweep("n3")
    assert site.reason("n3"), "the checks pass, but a person has to say that it was repaired"
    site.repaired("n3")
    site.sweep("n3")
    site.wait_node("n3", *FREE)


def test_busy_and_drained_nodes_are_refused(site: GateLab) -> None:
    job = site.submit("-wn1", script="#!/bin/sh\nexec sleep 600\n")
    site.lab.wait_job(job, "RUNNING")
    site.drain("n2", "the fan")
    done = burn_in(site, "n[1-3]")
    assert done.returncode == 2 and done.stdout == ""
    assert f"n1: busy with job {job} of {site.lab.user}" in done.stderr
    assert "n2: drained (the fan)" in done.stderr and "n3" not in done.stderr
    assert "n9: no such node in Slurm" in burn_in(site, "n9").stderr
    denied = site.lab.exec("head", argv(site, "n3"))
    assert denied.returncode == 3 and "denied" in denied.stderr
    site.lab.exec("head", ["scancel", str(job)], check=True)
    site.ended(job)


def test_ctrl_c_leaves_nothing(site: GateLab) -> None:
    before = len(site.shared("n3", "burn-in"))
    command = argv(site, "n[3-4]")
    process = site.lab.popen("head", command, user=False, stdout=subprocess.PIPE, text=True)
    with process:
        until(lambda: "ALLOCATED" in site.node("n3")[0], "its job runs", 30)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    for node in ("n3", "n4"):
        site.wait_node(node, *FREE)
    assert len(site.shared("n3", "burn-in")) == before, "nothing is recorded"
