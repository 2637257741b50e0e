"""What the doctor says of a cluster: the rules as tables, and the command on recorded answers."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from health import gate, settings
from health.admin import cli, doctor, rules, site_rules, trust
from health.admin.install import Present
from health.admin.rules import Facts, Want
from health.admin.site_rules import Bare, Installed, NodeGpus, StateDir
from health.admin.trust import Hole
from health.check import Where
from health.checks import ALL
from robust_slurm.slurm import Completed, Slurm
from robust_slurm.slurm.parse import settings as parse_config

DATA = Path(__file__).parent / "data"
ETC = "/etc/robust-slurm"
GATE: Mapping[str, Any] = {name: setting.default for name, setting in settings.GATE.items()}


def recorded_text(name: str) -> str:
    folder = "slurm" if name == "22.05" else "admin"
    return (DATA / folder / f"{name}-config.txt").read_text()


def recorded(name: str) -> dict[str, str]:
    return parse_config(recorded_text(name))


def wants(config: Mapping[str, str], gate: Mapping[str, Any] = GATE) -> dict[str, Want]:
    """The settings by key; of two with the same key the one that is needed."""
    found = rules.wants(Facts(config, gate, ETC))
    return {want.key: want for want in reversed(found)}


# ---- slurm.conf: real configurations of three releases

READY = ["24.11-ready", "26.05-ready"]
DEFAULTS = ["22.05", "24.11-default", "26.05-default"]


@pytest.mark.parametrize("name", READY)
def test_a_configuration_that_is_ready(name: str) -> None:
    found = rules.wants(Facts(recorded(name), GATE, ETC))
    assert {want.key for want in found if want.level == "fix"} == set()
    advice = {want.key for want in found if want.level == "advice"}
    assert advice <= {"AuthInfo", "ProctrackType", "SlurmctldParameters"}


@pytest.mark.parametrize("name", DEFAULTS)
def test_slurm_as_it_comes(name: str) -> None:
    found = wants(recorded(name))
    lines = [want.line() for want in found.values() if want.level == "fix"]
    flags = "Alloc,Contain,DeferBatch"
    if name != "22.05":  # an older slurmctld stops at the word
        flags += ",ForceRequeueOnFail"
    assert sorted(lines) == [
        f"Epilog={ETC}/epilog",
        "HealthCheckInterval=300",
        f"HealthCheckProgram={ETC}/healthcheck",
        f"Prolog={ETC}/prolog",
        f"PrologFlags={flags}",
        "SchedulerParameters=nohold_on_prolog_fail",
    ]
    assert found["HealthCheckNodeState"].level == found["JobRequeue"].level == "ok"
    assert found["PrologEpilogTimeout"].now == "unlimited"


def test_every_setting_of_the_rules_is_one_that_slurm_prints() -> None:
    known = set(recorded("26.05-default")) | {"Prolog", "Epilog"}
    keys = {want.key for name in DEFAULTS for want in rules.wants(Facts(recorded(name), GATE, ETC))}
    assert keys <= known


@pytest.mark.parametrize("name", [*READY, *DEFAULTS])
def test_with_the_lines_pasted_nothing_is_left(name: str) -> None:
    """And the lines stay the same, so that a second install has nothing to do."""
    config = recorded(name)
    first = rules.wants(Facts(config, GATE, ETC))
    for want in first:
        if want.level != "ok":
            config = {k: v for k, v in config.items() if not k.startswith(f"{want.key}[")}
            config[want.key] = want.value
    again = rules.wants(Facts(config, GATE, ETC))
    assert [want for want in again if want.level != "ok"] == []
    needed = [want.line() for want in first if want.needed]
    assert [want.line() for want in again if want.needed and want.key != "SchedulerParameters"] == [
        line for line in needed if not line.startswith("SchedulerParameters=")
    ]


def test_slurm_that_could_not_be_asked() -> None:
    found = wants({})
    assert found["PrologFlags"].value == "Alloc,Contain,DeferBatch"
    assert not {want.key for want in found.values() if "null" in want.line()}


# ---- slurm.conf: one setting at a time


@pytest.mark.parametrize(
    ("key", "config", "level", "value"),
    [
        # flags: those of the site stay, in any case; two hurt
        ("PrologFlags", {"PrologFlags": "Alloc,Contain"}, "fix", "Alloc,Contain,DeferBatch"),
        ("PrologFlags", {"PrologFlags": "DeferBatch,Contain,Alloc"}, "ok", "="),
        ("PrologFlags", {"PrologFlags": "alloc,contain,deferbatch,X11"}, "ok", "="),
        ("PrologFlags", {"PrologFlags": "NoHold,Serial"}, "fix", "Serial,Alloc,Contain,DeferBatch"),
        (
            "PrologFlags",
            {"PrologFlags": "Alloc,Contain,RunInJob,DeferBatch", "SLURM_VERSION": "24.05.1"},
            "fix",
            "Alloc,Contain,DeferBatch,ForceRequeueOnFail",
        ),
        (
            "PrologFlags",
            {"PrologFlags": "Alloc,Contain,DeferBatch", "SLURM_VERSION": "23.02.0"},
            "fix",
            "Alloc,Contain,DeferBatch,ForceRequeueOnFail",
        ),
        (
            "SchedulerParameters",
            {"SchedulerParameters": "bf_window=2880,defer"},
            "fix",
            "bf_window=2880,defer,nohold_on_prolog_fail",
        ),
        ("SchedulerParameters", {"SchedulerParameters": "NoHold_on_prolog_fail,x"}, "ok", None),
        # scripts
        ("Prolog", {"Prolog": f"{ETC}/prolog"}, "ok", f"{ETC}/prolog"),
        ("Prolog", {"Prolog": "/site/prolog"}, "fix", f"{ETC}/prolog"),
        ("Prolog", {"Prolog[0]": "/site/prolog", "Prolog[1]": f"{ETC}/prolog"}, "ok", None),
        ("Epilog", {"Epilog[0]": "/site/epilog", "SLURM_VERSION": "24.05.0"}, "fix", None),
        # ResvProlog and PrologSlurmctld are no Prolog
        ("Prolog", {"PrologSlurmctld[0]": f"{ETC}/prolog", "ResvProlog": "x"}, "fix", None),
        # the sweep
        ("HealthCheckInterval", {"HealthCheckInterval": "0 sec"}, "fix", "300"),
        ("HealthCheckInterval", {"HealthCheckInterval": "30 sec"}, "fix", "300"),
        ("HealthCheckInterval", {"HealthCheckInterval": "600 sec"}, "ok", "600"),
        ("HealthCheckNodeState", {"HealthCheckNodeState": "ANY"}, "ok", "ANY"),
        ("HealthCheckNodeState", {"HealthCheckNodeState": "CYCLE,IDLE"}, "ok", "CYCLE,IDLE"),
        ("HealthCheckNodeState", {"HealthCheckNodeState": "NONDRAINED_IDLE"}, "fix", "ANY"),
        (
            "HealthCheckNodeState",
            {"HealthCheckNodeState": "CYCLE,NONDRAINED_IDLE"},
            "fix",
            "ANY,CYCLE",
        ),
        ("HealthCheckNodeState", {"HealthCheckNodeState": "ALLOC,MIXED"}, "fix", "ANY"),
        ("HealthCheckNodeState", {"HealthCheckNodeState": "START_ONLY"}, "fix", "ANY"),
        ("HealthCheckTimeout", {"HealthCheckTimeout": "60 sec"}, "ok", "60"),
        ("HealthCheckTimeout", {"HealthCheckTimeout": "0 sec"}, "ok", "60"),
        ("HealthCheckTimeout", {"HealthCheckTimeout": "30 sec"}, "fix", "58"),
        # requeue
        ("JobRequeue", {"JobRequeue": "0"}, "fix", "1"),
        ("MaxBatchRequeue", {"MaxBatchRequeue": "5"}, "advice", "100"),
        ("MaxBatchRequeue", {"MaxBatchRequeue": "1000"}, "ok", "1000"),
        ("AuthInfo", {"AuthInfo": "(null)"}, "advice", "cred_expire=30"),
        ("AuthInfo", {"AuthInfo": "socket=/s"}, "advice", "socket=/s,cred_expire=30"),
        (
            "AuthInfo",
            {"AuthInfo": "cred_expire=300,socket=/s"},
            "advice",
            "socket=/s,cred_expire=30",
        ),
        ("AuthInfo", {"AuthInfo": "cred_expire=45"}, "ok", "cred_expire=45"),
        ("AuthInfo", {"AuthInfo": "cred_expire=5"}, "advice", "cred_expire=30"),
        # time-outs; 65534 is no limit
        ("PrologEpilogTimeout", {"PrologEpilogTimeout": "65534"}, "advice", "60"),
        ("PrologEpilogTimeout", {"PrologEpilogTimeout": "20"}, "fix", "60"),
        ("PrologEpilogTimeout", {"PrologEpilogTimeout": "38"}, "ok", "38"),
        ("PrologTimeout", {"PrologTimeout": "10", "EpilogTimeout": "60"}, "fix", "60"),
        ("EpilogTimeout", {"PrologTimeout": "10", "EpilogTimeout": "60"}, "ok", "60"),
        ("BatchStartTimeout", {"BatchStartTimeout": "10 sec"}, "ok", "10"),
        ("BatchStartTimeout", {"BatchStartTimeout": "5 sec"}, "fix", "19"),
        (
            "UnkillableStepTimeout",
            {"UnkillableStepTimeout": "60 sec", "MessageTimeout": "10 sec"},
            "advice",
            "180",
        ),
        (
            "UnkillableStepTimeout",
            {"UnkillableStepTimeout": "60 sec", "MessageTimeout": "100 sec"},
            "fix",
            "500",
        ),
        ("UnkillableStepTimeout", {"UnkillableStepTimeout": "600 sec"}, "ok", "600"),
        ("KillWait", {"KillWait": "5 sec"}, "advice", "30"),
        ("KillWait", {"KillWait": "120 sec"}, "ok", "120"),
        ("SlurmdTimeout", {"SlurmdTimeout": "0 sec"}, "fix", "300"),
        ("SlurmdTimeout", {"SlurmdTimeout": "3000 sec"}, "advice", "300"),
        ("SlurmdTimeout", {"SlurmdTimeout": "60 sec"}, "ok", "60"),
        # back into service
        ("ReturnToService", {"ReturnToService": "2"}, "advice", "1"),
        ("ReturnToService", {"ReturnToService": "0"}, "ok", "0"),
        ("RebootProgram", {"RebootProgram": "(null)"}, "advice", "/sbin/reboot"),
        ("RebootProgram", {"RebootProgram": "/usr/sbin/reboot"}, "ok", "/usr/sbin/reboot"),
        # what the prolog stands on
        ("SlurmUser", {"SlurmdUser": "root(0)"}, None, None),
        ("SlurmdUser", {"SlurmdUser": "slurm(64030)"}, "fix", "root"),
        ("PrEpPlugins", {"PrEpPlugins": "prep/site"}, "fix", "prep/site,prep/script"),
        ("PrEpPlugins", {"PrEpPlugins": "prep/script"}, None, None),
        ("ProctrackType", {"ProctrackType": "proctrack/linuxproc"}, "advice", "proctrack/cgroup"),
        ("ProctrackType", {"ProctrackType": "proctrack/cgroup"}, None, None),
    ],
)
def test_one_setting(
    key: str, config: dict[str, str], level: str | None, value: str | None
) -> None:
    found = wants({"SLURM_VERSION": "22.05.8"} | config).get(key)
    if level is None:
        assert found is None
        return
    assert found is not None
    assert (found.level, found.value) == (
        level,
        config[key] if value == "=" else value or found.value,
    )


def test_other_deadlines_need_other_timeouts() -> None:
    slow = {**GATE, "prolog_deadline": 15.0, "epilog_deadline": 100.0, "sweep_deadline": 400.0}
    found = wants(recorded("24.11-ready"), slow)
    bad = {want.key: want.value for want in found.values() if want.level == "fix"}
    assert bad == {"HealthCheckInterval": "408", "BatchStartTimeout": "26"}
    assert found["PrologEpilogTimeout"].level == "ok"  # 120, and 108 are enough
    config = recorded("24.11-ready") | {"AuthInfo": "socket=/s"}
    assert wants(config, slow)["AuthInfo"].value == "socket=/s,cred_expire=45"


def test_requeue_delay_has_an_option_of_its_own_from_25_11_on() -> None:
    now = {"SLURM_VERSION": "25.11.0", "SchedulerParameters": "defer"}
    needed, advice = [
        w for w in rules.wants(Facts(now, GATE, ETC)) if w.key == "SchedulerParameters"
    ]
    assert needed.line() == "SchedulerParameters=defer,nohold_on_prolog_fail"
    assert advice.line() == "SchedulerParameters=defer,nohold_on_prolog_fail,requeue_delay=10"
    assert (needed.level, advice.level) == ("fix", "advice")
    assert "AuthInfo" not in wants(now)
    slow = now | {"SchedulerParameters": "requeue_delay=900,nohold_on_prolog_fail"}
    _, advice = [w for w in rules.wants(Facts(slow, GATE, ETC)) if w.key == "SchedulerParameters"]
    assert advice.line() == "SchedulerParameters=nohold_on_prolog_fail,requeue_delay=10"


def test_expedited_requeue_is_known_from_25_11_on() -> None:
    now = {"SLURM_VERSION": "25.11.0", "SlurmctldParameters": "enable_configless"}
    want = wants(now)["SlurmctldParameters"]
    line = "SlurmctldParameters=enable_configless,enable_expedited_requeue"
    assert (want.level, want.line()) == ("advice", line)
    assert wants(now | {"SlurmctldParameters": "Enable_Expedited_Requeue"})[
        "SlurmctldParameters"
    ].level == ("ok")
    assert "SlurmctldParameters" not in wants({"SLURM_VERSION": "25.05.0"})


# ---- beside scripts of the site


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


# ---- how the sweep reaches Slurm


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
    assert doctor.bare_slurm(gate_).problem == problem
    monkeypatch.setattr(doctor.act, "PLACES", "/nowhere")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.bare_slurm(GATE) == Bare("/nowhere", str(tmp_path))


# ---- scripts of the site that call ours


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
    found = doctor.runs(config)
    assert f"{ETC}/prolog" in found["Prolog"]
    assert f"{ETC}/epilog" not in found["Epilog"]
    assert os.path.realpath("/usr/bin/true") in found["HealthCheckProgram"]
    levels = {w.key: w.level for w in rules.wants(Facts(config, GATE, ETC, found))}
    assert (levels["Prolog"], levels["Epilog"]) == ("ok", "fix")


# ---- the site


def test_release() -> None:
    assert site_rules.of_release((22, 5), "22.05.8").level == "ok"
    assert site_rules.of_release((21, 8), "21.08.1").level == "advice"
    assert "22.05 to 26.05" in site_rules.of_release(None, "").what
    assert rules.release({"SLURM_VERSION": "26.05.5"}) == (26, 5)


PARTITIONS: dict[str, tuple[Sequence[str], str]] = {
    "train": (["n1", "n2"], "UP"),
    "standby": (["s1"], "UP"),
    "empty": ([], "UP"),
    "down": (["s2"], "DOWN"),
}


@pytest.mark.parametrize(
    ("name", "configured", "level"),
    [
        ("standby", True, "ok"),
        ("", True, "ok"),
        ("spare", False, "advice"),
        ("spare", True, "fix"),
        ("empty", True, "fix"),
        ("down", True, "fix"),
        ("down", False, "advice"),
    ],
)
def test_standby_partition(name: str, configured: bool, level: str) -> None:
    found = site_rules.of_standby(name, configured, PARTITIONS)
    assert found.level == level
    assert bool(found.line) is (level != "ok")


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([("n1", "gpu:h100:8", -1), ("n2", None, -1)], ["ok"]),
        ([("n1", "gpu:h100:8(S:0-1)", 8)], ["ok"]),
        ([("n1", "gpu:h100:4", 8), ("n2", "gpu:h100:4", 8), ("n3", "gpu:8", 8)], ["fix n[1-2]"]),
        ([("n1", None, 8)], ["fix n1"]),
        ([("n1", None, -1), ("n2", "nic:2", -1)], ["advice"]),
        ([("n1", "gpu:a100_1g.5gb:7", 1)], ["ok"]),  # slices of a GPU
    ],
)
def test_gpus(nodes: list[tuple[str, str | None, int]], expected: list[str]) -> None:
    found = site_rules.of_gpus([NodeGpus(*node) for node in nodes], "robust.toml")
    assert [
        f"{r.level}{r.subject.removeprefix('GPUs').removeprefix(' of')}" for r in found
    ] == expected


DIR = Present("dir", mode=0o755)
OPEN_DIR = Present("dir", mode=0o1777)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (StateDir(""), [("advice", 'state_dir = "/shared/robust-slurm"')]),
        (StateDir("/s", "", "nfs4", True, DIR, OPEN_DIR), [("ok", "")]),
        (StateDir("/s", "", "xfs", False, DIR, OPEN_DIR), [("advice", "")]),
        (
            StateDir("/s", "", "nfs4", True),
            [
                ("fix", "install -d -o root -g root -m 0755 /s/nodes"),
                ("fix", "install -d -o root -g root -m 1777 /s/jobs"),
            ],
        ),
        (
            StateDir("/s", "", "nfs4", True, DIR._replace(mode=0o777), OPEN_DIR._replace(uid=9)),
            [
                ("fix", "install -d -o root -g root -m 0755 /s/nodes"),
                ("fix", "install -d -o root -g root -m 1777 /s/jobs"),
            ],
        ),
        (StateDir("/s", "no answer in 5 s"), [("fix", "install -d -m 0755 /s")]),
    ],
)
def test_state_dir(state: StateDir, expected: list[tuple[str, str]]) -> None:
    found = site_rules.of_state_dir(state, "robust.toml")
    assert [(remark.level, remark.line) for remark in found] == expected


def test_the_state_directory_itself(tmp_path: Path) -> None:
    assert doctor.look_at_state("") == StateDir("")
    assert "No such file" in doctor.look_at_state(str(tmp_path / "nope")).problem
    (tmp_path / "nodes").mkdir(mode=0o755)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs").chmod(0o1777)
    found = doctor.look_at_state(str(tmp_path))
    assert found.problem == "" and found.fstype
    assert found.nodes == Present("dir", "", 0o755, os.getuid())
    assert found.jobs.mode == 0o1777


def test_the_state_directory_is_prepared(tmp_path: Path) -> None:
    assert doctor.make_state("") == []
    assert "No such file" in doctor.make_state(str(tmp_path / "not-mounted"))[0]
    made = [f"made {tmp_path}/nodes", f"made {tmp_path}/jobs"]
    assert doctor.make_state(str(tmp_path))[:2] == made
    assert (tmp_path / "jobs").stat().st_mode & 0o7777 == 0o1777
    (tmp_path / "nodes").chmod(0o777)
    (again,) = [line for line in doctor.make_state(str(tmp_path)) if "/nodes" in line]
    assert "mode 0777" in again and "install -d" in again


PROLOG = f"{ETC}/prolog"
FILE = Present("file", "x", 0o755)


@pytest.mark.parametrize(
    ("file", "level", "line"),
    [
        (Installed(PROLOG, FILE, False), "ok", ""),
        (Installed(PROLOG, Present("none"), True), "fix", "robust-admin install"),
        (Installed(PROLOG, FILE._replace(mode=0o644), False), "fix", f"chmod 0755 {PROLOG}"),
        (
            Installed(PROLOG, FILE, False, Hole("/etc", "belongs to uid 7")),
            "fix",
            "chown -h root:root /etc && chmod go-w /etc",
        ),
        (Installed(PROLOG, FILE, True), "advice", "robust-admin install"),
        # an edited robust.toml is as it should be
        (Installed(f"{ETC}/robust.toml", FILE, True), "ok", ""),
        (Installed(f"{ETC}/robust.toml.new", Present("none"), True), "ok", ""),
    ],
)
def test_files(file: Installed, level: str, line: str) -> None:
    (found,) = site_rules.of_files(ETC, True, [file], ["prolog"], True)
    assert (found.level, found.line) == (level, line)


def test_nothing_installed() -> None:
    (found,) = site_rules.of_files("/e", False, [], ["prolog"], True)
    assert (found.level, found.line) == ("fix", "robust-admin install --etc /e")
    (found,) = site_rules.of_files(ETC, False, [], ["prolog"], False)
    assert found.level == "advice", "a login node needs none"
    assert found.line == "robust-admin install --nodes <nodes> --ssh --dry-run"


def test_code_that_others_can_write() -> None:
    (good,) = site_rules.of_code("/opt/r", [], "", "", [])
    assert good.level == "ok"
    bad = site_rules.of_code("/opt/r", ["/opt/r belongs to uid 7"], "chown", "no start", ["a note"])
    assert [remark.level for remark in bad] == ["fix", "fix", "advice"]
    assert bad[1].line == "chown"


def test_the_repair_of_code_spares_the_system(tmp_path: Path) -> None:
    """All of a virtual environment; of any other prefix (/usr) only the places themselves."""
    mine, deep = Hole(f"{tmp_path}/lib", "x"), Hole(f"{tmp_path}/lib/a b", "x")
    places = f"{tmp_path}/lib '{tmp_path}/lib/a b'"
    narrow = f"chown -h root:root {places} && chmod go-w {places}"
    assert trust.repair(str(tmp_path), [mine, deep]) == narrow
    (tmp_path / "pyvenv.cfg").touch()
    whole = f"chown -R root:root {tmp_path} && chmod -R go-w {tmp_path}"
    assert trust.repair(str(tmp_path), [mine, deep]) == whole
    assert "-R" not in trust.repair(str(tmp_path), [Hole("/opt", "x")])


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to others: root")
def test_who_could_change_a_file(tmp_path: Path) -> None:
    top = tmp_path / "top"
    file = top / "in" / "prolog"
    file.parent.mkdir(parents=True)
    file.write_text("x")
    for path in (top, file.parent, file):
        path.chmod(0o755)
    assert said(file) == ""
    link = tmp_path / "link"
    link.symlink_to(file)
    assert said(link) == ""
    os.chown(link, 7, 7, follow_symlinks=False)
    assert said(link) == f"{link} belongs to uid 7"
    top.chmod(0o775)
    assert said(file) == f"{top} can be written by others (mode 0775)"
    top.chmod(0o1777)
    assert said(file) == "", "sticky, as /tmp"
    top.chmod(0o755)
    os.chown(file.parent, 7, 7)
    assert said(file) == f"{file.parent} belongs to uid 7"
    assert "No such file" in said(top / "nope")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "too many levels" in said(loop)


def said(path: Path) -> str:
    return str(trust.hole(str(path)) or "")


# ---- the command, on recorded answers


class Answers:
    """A slurmctld that says what was recorded."""

    def __init__(self, config: str, up: bool = True):
        said = {
            "config": recorded_text(config),
            "node": "".join(
                f"NodeName=n{i} State=IDLE Partitions=train Gres=gpu:h100:8\n" for i in (1, 2)
            ),
            "partition": "PartitionName=train Nodes=n[1-2] State=UP\n",
        }
        self.said = said
        self.up = up

    def __call__(
        self,
        argv: Sequence[str],
        deadline_s: float,
        input: str | None,
        env: Mapping[str, str],
        cwd: Path | None,
    ) -> Completed:
        if "version" in argv:
            return Completed(0, "slurm 24.11.5\n", "")
        if "ping" in argv:
            return Completed(
                0, f"Slurmctld(primary) at head is {'UP' if self.up else 'DOWN'}\n", ""
            )
        assert self.up
        return Completed(0, self.said[argv[-1]], "")


def run(etc: Path, config: str, as_json: bool = False, up: bool = True) -> tuple[int, str]:
    out = io.StringIO()
    code = doctor.main(str(etc), as_json, out, Slurm(Answers(config, up)), lambda gate: Bare(""))
    return code, out.getvalue()


def test_every_fix_is_printed_with_its_line(tmp_path: Path) -> None:
    code, text = run(tmp_path, "22.05")
    assert code == 1
    head = "slurm.conf is head:/var/lab/slurm.conf, and its copies on the nodes"
    assert text.startswith(f"cluster doorlab, Slurm 22.05.8; {head}\n")
    assert "\nFIX    Prolog is not set\n       checks the node" in text
    assert f"\n       slurm.conf:  Prolog={tmp_path}/prolog\n" in text
    assert text.index("FIX ") < text.index("ADVICE")
    assert re.search(r"\n\d+ to fix, \d+ advice, \d+ in order\n$", text)
    code, text = run(tmp_path, "22.05", as_json=True)
    found = json.loads(text)
    assert code == 1 and found["version"] == 1 and found["slurm"] == "22.05.8"
    assert {r["level"] for r in found["remarks"]} == {"ok", "fix", "advice"}
    assert all(r["line"] and r["where"] for r in found["remarks"] if r["level"] == "fix")


def test_a_broken_robust_toml_is_named(tmp_path: Path) -> None:
    toml = tmp_path / "robust.toml"
    toml.write_text(
        "stat_dir = '/s'\n[gate]\nprolog_deadlin = 3.0\n"
        '[nodes."n2".gate]\nprolog_deadline = "x"\n'
        '[nodes."n[1-2]".health.gpu_count]\nexpected = 4\n'
    )
    _, text = run(tmp_path, "24.11-ready", as_json=True)
    said = [r["what"] for r in json.loads(text)["remarks"] if r["subject"] == str(toml)]
    assert any("prolog_deadlin" in what and "did you mean" in what for what in said)
    assert any('nodes."n2"' in what for what in said)
    assert any("stat_dir" in what for what in said)
    gpus = [r for r in json.loads(text)["remarks"] if r["subject"].startswith("GPUs")]
    assert [(r["level"], r["subject"]) for r in gpus] == [("fix", "GPUs of n[1-2]")]


@pytest.mark.parametrize("up", [True, False])
def test_a_robust_toml_that_cannot_be_used_is_a_fault(tmp_path: Path, up: bool) -> None:
    toml = tmp_path / "robust.toml"

    def said() -> list[str]:
        code, text = run(tmp_path, "24.11-ready", as_json=True, up=up)
        assert code == (1 if up else 2)
        remarks = [r for r in json.loads(text)["remarks"] if r["subject"] == str(toml)]
        assert {r["level"] for r in remarks} == {"fix"}
        return [r["what"] for r in remarks]

    toml.write_text("[gate]\ndry_run = \n")
    assert any(
        "Invalid value (at line 2, column 11); the defaults apply" in what for what in said()
    )
    (tmp_path / "robust.toml.last").write_text("[gate]\ndry_run = true\n")
    (tmp_path / "robust.toml.last").chmod(0o644)
    assert any("are in force (robust.toml.last)" in what for what in said())
    toml.unlink()
    toml.symlink_to("/nowhere")
    assert len(said()) == 1 and "is a link; the settings of" in said()[0]


def test_slurm_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said, and what can be seen without Slurm is looked at all the same."""
    (tmp_path / "robust.toml").write_text("[gate]\nprolog_deadlin = 3.0\n")
    code, text = run(tmp_path, "22.05", as_json=True, up=False)
    assert code == 2
    remarks = json.loads(text)["remarks"]
    assert [r["subject"] for r in remarks] == ["Slurm", f"{tmp_path}/robust.toml", str(tmp_path)]
    assert "no slurmctld answers" in remarks[0]["what"] and "prolog_deadlin" in remarks[1]["what"]
    monkeypatch.setenv("PATH", str(tmp_path))
    out = io.StringIO()
    assert cli.main(["doctor", "--etc", str(tmp_path)], out) == 2
    assert "scontrol is not in PATH" in out.getvalue()


def test_defaults_of_the_gate_fit_slurms_own() -> None:
    """Every deadline that robust.toml comes with is below what slurmd allows by default."""
    assert rules.longest(GATE, "sweep") < rules.HEALTH_CHECK_LIMIT_S
    assert GATE["prolog_deadline"] + 1 <= 10


@pytest.mark.parametrize("where", ["prolog", "epilog", "sweep"])
def test_the_time_that_slurm_must_allow_is_what_the_gate_takes(where: Where) -> None:
    taken = gate.budget(settings.defaults(ALL), where)
    assert rules.longest(GATE, where) == taken + rules.MARGIN_S
