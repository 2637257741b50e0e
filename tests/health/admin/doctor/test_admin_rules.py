"""Lines that slurm.conf should have for the gate: on real configurations, and key by key."""

from __future__ import annotations

import pytest
from slurm_configs import ETC, GATE, recorded, wants

from health import settings
from health.admin.doctor import rules, script_rules
from health.admin.want import MARGIN_S, SiteFacts, longest
from health.check import Where
from health.checks import ALL
from health.gate import gate

READY = ["24.11-ready", "26.05-ready"]
NEW = {"SLURM_VERSION": "26.05.5", "CgroupPlugin": "cgroup/v2"}
DEFAULTS = ["22.05", "24.11-default", "26.05-default"]


@pytest.mark.parametrize("name", READY)
def test_a_configuration_that_is_ready(name: str) -> None:
    found = rules.wants(SiteFacts(recorded(name), GATE, ETC))
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
    keys = {
        want.key for name in DEFAULTS for want in rules.wants(SiteFacts(recorded(name), GATE, ETC))
    }
    assert keys <= known


@pytest.mark.parametrize("name", [*READY, *DEFAULTS])
def test_with_the_lines_pasted_nothing_is_left(name: str) -> None:
    """The lines stay the same, so that a second install has nothing to do."""
    config = recorded(name)
    first = rules.wants(SiteFacts(config, GATE, ETC))
    for want in first:
        if want.level != "ok":
            config = {k: v for k, v in config.items() if not k.startswith(f"{want.key}[")}
            config[want.key] = want.value
    again = rules.wants(SiteFacts(config, GATE, ETC))
    assert [want for want in again if want.level != "ok"] == []
    needed = [want.line() for want in first if want.needed]
    assert [want.line() for want in again if want.needed and want.key != "SchedulerParameters"] == [
        line for line in needed if not line.startswith("SchedulerParameters=")
    ]


def test_slurm_that_could_not_be_asked() -> None:
    found = wants({})
    assert found["PrologFlags"].value == "Alloc,Contain,DeferBatch"
    assert not {want.key for want in found.values() if "null" in want.line()}


# ---- one setting at a time


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
        ("CgroupJobIdPaths", NEW | {"CgroupJobIdPaths": "no"}, "advice", "yes"),
        ("CgroupJobIdPaths", NEW | {"CgroupJobIdPaths": "yes"}, "ok", "yes"),
        ("CgroupJobIdPaths", NEW, None, None),  # 26.05.0 stops at the word
        ("CgroupJobIdPaths", {"CgroupPlugin": "cgroup/v2"}, None, None),
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


def test_a_line_of_cgroup_conf_names_its_file() -> None:
    found = wants(NEW | {"CgroupJobIdPaths": "no"})["CgroupJobIdPaths"]
    assert (found.where, found.line()) == ("cgroup.conf", "CgroupJobIdPaths=yes")
    assert not found.needed


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
        w for w in rules.wants(SiteFacts(now, GATE, ETC)) if w.key == "SchedulerParameters"
    ]
    assert needed.line() == "SchedulerParameters=defer,nohold_on_prolog_fail"
    assert advice.line() == "SchedulerParameters=defer,nohold_on_prolog_fail,requeue_delay=10"
    assert (needed.level, advice.level) == ("fix", "advice")
    assert "AuthInfo" not in wants(now)
    slow = now | {"SchedulerParameters": "requeue_delay=900,nohold_on_prolog_fail"}
    _, advice = [
        w for w in rules.wants(SiteFacts(slow, GATE, ETC)) if w.key == "SchedulerParameters"
    ]
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


# ---- time for the gate


def test_defaults_of_the_gate_fit_slurms_own() -> None:
    """Every deadline that robust.toml comes with is below what slurmd allows by default."""
    assert longest(GATE, "sweep") < script_rules.HEALTH_CHECK_LIMIT_S
    assert GATE["prolog_deadline"] + 1 <= 10


@pytest.mark.parametrize("where", ["prolog", "epilog", "sweep"])
def test_the_time_that_slurm_must_allow_is_what_the_gate_takes(where: Where) -> None:
    taken = gate.budget(settings.defaults(ALL), where)
    assert longest(GATE, where) == taken + MARGIN_S
