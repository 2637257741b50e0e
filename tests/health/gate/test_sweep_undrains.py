"""The sweep undrains what it proves to be its own and well again, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sweep_site
from gate_site import GONE, GateSite, finding

from health import cli
from health.sweep import main
from prolog.cli import main as prolog

pytestmark = pytest.mark.slow

site = sweep_site.site


def test_what_passes_again_comes_back(site: GateSite, capfd: pytest.CaptureFixture[str]) -> None:
    site.find(finding(action="none"))
    main([])
    site.find()
    assert main([]) == 0
    assert site.slurm.drained == []
    assert site.event("undrain")["reason"] == "robust:node:broken:gpu3:none:job0"
    assert len(site.shared("drain", "undrain")) == 2
    assert "undrained" in capfd.readouterr().err


def test_what_wants_a_reboot_waits_for_it(
    site: GateSite, capfd: pytest.CaptureFixture[str]
) -> None:
    site.find(finding())
    main([])
    site.find()
    main([])
    assert site.slurm.drained == ["n1"]
    assert "stays drained: the node has not rebooted since" in capfd.readouterr().err
    # The same drain, made during another boot.
    path = site.spool / "history.jsonl"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    path.write_text(path.read_text().replace(boot, "another-boot"))
    main([])
    assert site.slurm.drained == []


def test_what_a_person_must_mend_waits_for_the_word(site: GateSite) -> None:
    site.find(finding(action="service"))
    main([])
    site.find()
    main([])
    assert site.slurm.drained == ["n1"]
    assert cli.main(["repaired", "--config", str(site.toml), "--node", "n1"]) == 0
    main([])
    assert site.slurm.drained == []


@pytest.mark.parametrize("text", ["replace the fan", "robust:node:x:-:none:job1 do not touch"])
def test_no_drain_of_anybody_else(site: GateSite, text: str) -> None:
    site.slurm.set(state="IDLE+DRAIN", reason=text)
    main([])
    assert site.slurm.drained == ["n1"] and site.slurm.orders == []


def test_slurms_drain_for_a_reason_that_outlived_ours(site: GateSite) -> None:
    """24.11 without slurmdbd: an operator resumes the node, then Slurm drains it by itself."""
    site.find(finding(action="none"))
    main([])
    site.slurm.set(state="IDLE")  # the reason stays
    site.find()
    main([])
    assert site.event("lifted")["reason"] == "robust:node:broken:gpu3:none:job0"
    site.slurm.set(state="IDLE+DRAIN")
    main([])
    assert site.slurm.drained == ["n1"]


@pytest.mark.parametrize("state", ["DOWN+DRAIN", "IDLE+DRAIN+MAINTENANCE"])
def test_no_node_that_is_also_something_else(site: GateSite, state: str) -> None:
    site.slurm.set(state=state, reason="robust:node:broken:-:none:job1")
    main([])
    assert site.slurm.orders == []


def test_a_node_that_still_fails_stays(site: GateSite) -> None:
    site.find(finding(action="none"))
    main([])
    site.find(finding("ERROR", "none", "tool"))
    main([])
    assert site.slurm.drained == ["n1"]


def test_a_person_who_is_quicker_by_a_moment(
    site: GateSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    from health import sweep

    site.find(finding(action="none"))
    main([])
    site.find()
    real = sweep.why_not

    def meanwhile(*args: Any) -> str:
        site.slurm.set(reason="robust:node:broken:gpu3:none:job0 I look at it")
        return real(*args)

    monkeypatch.setattr(sweep, "why_not", meanwhile)
    main([])
    # The new reason begins as ours did; it is the whole that counts.
    assert site.slurm.drained == ["n1"]
    assert site.events("undrain") == []


def test_slurms_own_words_for_our_drain(site: GateSite) -> None:
    """slurmctld was away when the prolog closed, and drained by itself on exit code 1."""
    site.environ(job=7)
    site.slurm.die()
    site.find(finding(action="none"))
    assert prolog([]) == 1
    site.slurm.live()
    site.slurm.set(state="IDLE+DRAIN", reason="Prolog error")
    site.environ(job=0)
    main([])
    assert site.slurm.drained == ["n1"]  # it still fails
    site.find()
    main([])
    assert site.slurm.drained == []
    assert site.event("undrain")["reason"] == "Prolog error"


def test_dry_run_undrains_nothing(site: GateSite, capfd: pytest.CaptureFixture[str]) -> None:
    site.find(finding(action="none"))
    main([])
    site.find()
    assert main(["--dry-run"]) == 0
    assert site.slurm.drained == ["n1"]
    assert "would be undrained" in capfd.readouterr().err


def test_leftovers_must_really_be_gone(site: GateSite, monkeypatch: pytest.MonkeyPatch) -> None:
    from epilog.cli import main as epilog
    from health.leftovers import cleanup

    left = cleanup.Cleared(0, 0, [cleanup.LEFT.found("left after SIGKILL: 5 (cat) state R")])
    monkeypatch.setattr(cleanup, "clear", lambda *args: left)
    site.environ(job=7)
    epilog([])
    site.environ(job=0)
    main([])
    assert site.slurm.drained == ["n1"]
    asked: list[Any] = []

    def clear(*args: Any) -> cleanup.Cleared:
        asked.append(args[:3])
        return cleanup.Cleared(0, 0, [])

    monkeypatch.setattr(cleanup, "clear", clear)
    main([])
    assert asked == [(7, GONE, "job")]
    assert site.slurm.drained == []
