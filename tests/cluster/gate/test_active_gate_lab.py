"""Active tests in epilog and sweep beside a real slurmctld, with a fake interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_python import fake_python
from gate_jobs import begin, finish, of
from gate_lab import FREE, GateLab, gate_lab
from waiting import until

from robust_slurm import commands

WRONG = {
    "status": "FAIL", "class": "node", "check": "active-gemm-wrong", "device": "gpu1",
    "evidence": "2 of 9 products differ", "action": "service",
}  # fmt: skip


@pytest.fixture(scope="module")
def made() -> Iterator[GateLab]:
    with gate_lab(nodes=2) as site:
        yield site


@pytest.fixture
def site(made: GateLab) -> Iterator[GateLab]:
    yield made
    made.mend()


def interpreter(site: GateLab, *rows: Any, before: str = "") -> None:
    """Install an interpreter that only claims to test, and settings with it."""
    ran = [{"test": name} for name in ("bitwise", "gemm", "memory", "links", "local")]
    cleared = [] if rows else ["n"]
    answer = json.dumps({"findings": {"n": rows}, "cleared": cleared, "measured": ran})
    path = site.etc.parent / "python"
    fresh = path.with_suffix(".new")
    fresh.write_text(f"#!/bin/sh\n{before}\necho '{answer}'\nexit {int(bool(rows))}\n")
    fresh.chmod(0o755)
    fresh.rename(path)
    python = fake_python(site.etc.parent / "environment", path)
    site.settings(more=f'[active]\npython = "{python}"\nundrain = "quick"\n')


def reported(site: GateLab, node: str) -> int:
    job = begin(site, node)
    site.report_node(node, job)
    finish(site, job)
    return job


def test_slurm_gives_the_node_to_nobody_during_an_epilog(site: GateLab) -> None:
    interpreter(site)
    job = reported(site, "n1")
    (event,) = of(site, "n1", job, "active-run")
    assert (event.data["result"], event.data["why"]) == ("passed", "accusation")
    assert site.node("n1") == FREE


def test_wrong_arithmetic_drains_and_stays_until_it_passes(site: GateLab) -> None:
    interpreter(site, WRONG)
    job = reported(site, "n1")
    assert site.reason("n1") == f"robust:node:active-gemm-wrong:gpu1:service:job{job}"
    site.repaired("n1")
    site.sweep("n1")
    assert site.reason("n1"), "it was said to be repaired, and fails again"
    interpreter(site)
    site.repaired("n1")
    site.sweep("n1")
    site.wait_node("n1", *FREE)


def test_a_job_that_comes_is_not_kept_waiting_by_a_test(site: GateLab) -> None:
    interpreter(site, before="exit 7")
    job = reported(site, "n2")
    (event,) = of(site, "n2", job, "active-run")
    assert event.data["result"] == "owed"
    pids = site.etc.parent / "pids"
    interpreter(site, WRONG, before=f"setsid sleep 300 & echo $! >> {pids}; wait")
    stub = ["env", "-i", "SLURMD_NODENAME=n2", str(site.etc / "healthcheck")]
    with site.lab.popen("n2", stub, user=False, cwd="/", stderr=subprocess.PIPE) as sweep:
        until(pids.exists, "the sweep tests", 20)
        site.run("n2")  # its prolog finds nothing in the way, and it does well
        assert sweep.wait(30) == 0
    assert not any("sleep 300" in words for _, words in site.processes("n2"))
    assert site.node("n2") == FREE and len(site.local("n2", "active-run")) == 1, "still owed"


def real_environment(site: GateLab) -> tuple[Path, Path]:
    """The gate's [active] python is a virtual environment whose x.pth has code: that and x.pth.

    That code must never run as root: it leaves a file named "ran" beside the environment.
    """
    top = site.etc.parent / "env"
    base = os.path.realpath(sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", "--clear", str(top)], check=True)
    (packages,) = top.glob("lib/python3*/site-packages")
    code = packages / "x.pth"
    (top.parent / "named").mkdir(exist_ok=True)
    code.write_text(f"import os; open('{top.parent}/ran', 'a').close()\n{top.parent}/named\n")
    code.chmod(0o644)
    (top.parent / "ran").unlink(missing_ok=True)
    site.settings(more=f'[active]\npython = "{top}/bin/python"\n')
    return top, code


def doctor(site: GateLab, node: str, python: Path) -> dict[str, Any]:
    """Return the remark of `robust-admin doctor` there on the interpreter of the active tests."""
    own = str(site.prefix / "bin" / "python3")
    words = [*commands.words("health.admin.cli"), "doctor", "--json", "--etc", str(site.etc)]
    done = site.lab.exec(node, [own, "-I", *words], user=False, cwd="/", timeout=60)
    remarks = json.loads(done.stdout)["remarks"]
    (found,) = [r for r in remarks if r["subject"] == f"[active] python = {python}"]
    return dict(found)


def test_an_environment_that_users_can_change_is_not_run(site: GateLab) -> None:
    top, code = real_environment(site)
    python, ran, named = top / "bin" / "python", top.parent / "ran", top.parent / "named"
    assert doctor(site, "n1", python)["level"] == "ok" and not ran.exists()
    for place, change in (
        (code, lambda: os.chown(code, site.lab.uid, site.lab.uid)),
        (named, lambda: named.chmod(0o777)),
    ):
        change()
        said = doctor(site, "n1", python)
        assert said["level"] == "fix" and "the gate does not use it" in said["what"], said
        assert str(place) in said["what"] and str(place) in said["line"], said
        job = reported(site, "n1")
        (event,) = of(site, "n1", job, "active-run")
        assert event.data["result"] == "owed", event.data
        (finding,) = event.data["findings"]
        assert "is not used" in finding["evidence"] and str(place) in finding["evidence"], finding
        assert not ran.exists()
        assert site.node("n1") == FREE
        site.lab.exec("n1", ["sh", "-c", said["line"]], user=False, check=True)
    reported(site, "n1")
    assert doctor(site, "n1", python)["level"] == "ok", "put right as the doctor says"
    assert not ran.exists(), "nor is code in a *.pth file ever run by root"
