"""Scripts of the site beside ours, or calling ours; how the sweep finds Slurm's commands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from slurm_configs import ETC, GATE, wants

from health.admin.doctor import rules, run, site_rules
from health.admin.doctor.site_rules import Bare
from health.admin.want import SiteFacts


@pytest.mark.parametrize(
    ("config", "where", "line"),
    [
        ({"Prolog": "/s/prolog.sh"}, "/s/prolog.sh, on top", f"{ETC}/prolog || exit $?"),
        ({"Prolog": "/s/p.d/*"}, "shell", f"ln -s {ETC}/prolog /s/p.d/robust"),
        ({"Prolog": "/s/p.d/*.sh"}, "shell", f"ln -s {ETC}/prolog /s/p.d/robust.sh"),
        ({"Prolog": "/s/[pq].d/*"}, "shell", f"ln -s {ETC}/prolog /s/[pq].d/<name>"),
        # from 24.05 on Slurm runs several: a line of our own is added
        (
            {"Prolog[0]": "/s/p.sh", "SLURM_VERSION": "24.05.1"},
            "slurm.conf",
            f"Prolog={ETC}/prolog",
        ),
    ],
)
def test_a_prolog_of_the_site_stays(config: dict[str, str], where: str, line: str) -> None:
    want = wants({"SLURM_VERSION": "22.05.8"} | config)["Prolog"]
    assert (want.level, want.where, want.line()) == ("fix", where, line)


def test_a_health_check_program_of_the_site_stays() -> None:
    for release in ("22.05.8", "26.05.0"):
        found = wants({"SLURM_VERSION": release, "HealthCheckProgram": "/usr/sbin/nhc"})
        want = found["HealthCheckProgram"]
        assert (want.where, want.line()) == ("/usr/sbin/nhc, on top", f"{ETC}/healthcheck")


def test_what_slurm_runs_in_effect(tmp_path: Path) -> None:
    for name, text in {
        "50-ours": f"#!/bin/sh\nexec {ETC}/prolog\n",
        "60-site": "#!/bin/sh\n# not any more: /etc/robust-slurm/epilog\ntrue\n",
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "link").symlink_to("/usr/bin/true")
    config = {
        "Prolog[0]": f"{tmp_path}/*",
        "Epilog": f"{tmp_path}/60-site",
        "HealthCheckProgram": f"{tmp_path}/link",
    }
    found = run.runs(config)
    assert f"{ETC}/prolog" in found["Prolog"]
    assert f"{ETC}/epilog" not in found["Epilog"]
    assert os.path.realpath("/usr/bin/true") in found["HealthCheckProgram"]
    levels = {w.key: w.level for w in rules.wants(SiteFacts(config, GATE, ETC, found))}
    assert (levels["Prolog"], levels["Epilog"]) == ("ok", "fix")


def test_of_the_sweeps_way_to_slurm() -> None:
    config = {"SLURM_CONF": "/sw/slurm.conf"}
    assert site_rules.of_bare(Bare("/usr/bin"), config, "t")[0].level == "ok"
    (found,) = site_rules.of_bare(Bare("/usr/bin", "/sw/bin"), config, "t")
    assert (found.where, found.line) == ("t", '[gate]\nslurm_bin = "/sw/bin"')
    (found,) = site_rules.of_bare(Bare("/usr/bin", "", "no source"), config, "t")
    assert "no source" in found.what
    assert found.line == "install -d /etc/slurm && ln -s /sw/slurm.conf /etc/slurm/slurm.conf"


SCONTROL = '#!/bin/sh\n[ -z "$SLURM_CONF" ] && {text}\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("echo 'Slurmctld(primary) at head is UP'", ""),
        ("echo 'Slurmctld(primary) at head is DOWN'", "Slurmctld(primary) at head is DOWN"),
        ("echo 'scontrol: fatal: no source' >&2", "scontrol: fatal: no source"),
    ],
)
def test_slurms_commands_as_the_sweep_starts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    monkeypatch.setenv("SLURM_CONF", "/somewhere/slurm.conf")
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(SCONTROL.format(text=text))
    scontrol.chmod(0o755)
    gate_ = {**GATE, "slurm_bin": str(tmp_path)}
    assert run.bare_slurm(gate_).problem == problem
    monkeypatch.setattr(run.settings, "PLACES", "/nowhere")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run.bare_slurm(GATE) == Bare("/nowhere", str(tmp_path))
