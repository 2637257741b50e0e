"""The families services, clock, cpu and slurmd."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
from fake_host import SLURM_CONF, SPOOL, healthy, ids, process
from fake_system import NOW, UPTIME, context, log

from health.checks.host import clock, cpu, services, slurmd
from health.node.system import CommandOutput, PathEntry

FAIL, WARN = "FAIL", "WARN"

# --- services -----------------------------------------------------------------------------------

CGROUP = "/sys/fs/cgroup/system.slice/nvidia-fabricmanager.service/cgroup.events"
FABRIC = "nvidia-fabricmanager.service"
NO_SWITCH = ("/sys/bus/pci/drivers/nvidia-nvswitch/0000:05:00.0/class",)


def show(*units: str) -> tuple[str, ...]:
    shown = "--property=LoadState,ActiveState,SubState"
    return ("/usr/bin/systemctl", "show", shown, "--", *units)


def said(load: str, active: str, sub: str) -> str:
    return f"LoadState={load}\nActiveState={active}\nSubState={sub}\n"


@pytest.mark.parametrize(
    ("load", "active", "sub", "state"),
    [
        ("loaded", "active", "running", "up"),
        ("loaded", "active", "exited", "up"),
        ("loaded", "reloading", "reload", "up"),
        ("loaded", "failed", "failed", "failed"),
        ("loaded", "inactive", "dead", "stopped"),
        ("loaded", "activating", "auto-restart", "failed"),
        ("loaded", "activating", "start", "unknown"),
        ("not-found", "inactive", "dead", "missing"),
        ("masked", "inactive", "dead", "stopped"),
        ("", "", "", "unknown"),
    ],
)
def test_judge_unit(load: str, active: str, sub: str, state: str) -> None:
    assert services.judge_unit(said(load, active, sub))[0] == state


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (said("loaded", "active", "running"), []),
        (said("loaded", "failed", "failed"), [(FAIL, "service-fabric-manager", FABRIC)]),
        (said("not-found", "inactive", "dead"), [(WARN, "service-unknown", FABRIC)]),
        (TimeoutError(errno.ETIMEDOUT, "did not end"), [(WARN, "service-unknown", FABRIC)]),
        (FileNotFoundError(errno.ENOENT, "none"), [(WARN, "service-unknown", FABRIC)]),
    ],
)
def test_fabric_manager_of_a_node_with_switches(answer: Any, found: list[Any]) -> None:
    output = CommandOutput(0, answer, "") if isinstance(answer, str) else answer
    system = healthy(without=(CGROUP,), commands={show(FABRIC): output})
    assert ids(services.CHECK.run(system)) == found


def test_fabric_manager_asks_for_its_own_action() -> None:
    output = CommandOutput(0, said("loaded", "failed", "failed"), "")
    [finding] = services.CHECK.run(healthy(without=(CGROUP,), commands={show(FABRIC): output}))
    assert finding.action == "restart-fabric-manager"


def test_fabric_manager_seen_as_a_process_of_another_container() -> None:
    """The fabric manager runs, whoever keeps it."""
    output = CommandOutput(0, said("not-found", "inactive", "dead"), "")
    manager = process(1200, "nv-fabricmanager")
    system = healthy((manager,), without=(CGROUP,), commands={show(FABRIC): output})
    assert services.CHECK.run(system) == []


def test_without_systemd_nothing_is_down_for_certain() -> None:
    options = {"services": {"required": ["sssd"]}}
    system = healthy(more={"/proc/1/comm": "slurmd\n"}, without=(CGROUP,), options=options)
    assert ids(services.CHECK.run(system)) == [(WARN, "service-unknown", "sssd.service")]
    assert not [asked for asked in system.asked if asked.startswith("command")]


@pytest.mark.parametrize(
    ("devices", "wanted"),
    [
        ({"class": "0x068000", "vendor": "0x10de"}, True),
        ({"class": "0x068000", "vendor": "0x8086"}, False),
        ({"class": "0x030200", "vendor": "0x10de"}, False),
    ],
)
def test_switches_on_the_bus(devices: dict[str, str], wanted: bool) -> None:
    """The driver is not loaded: the bus says what is there."""
    more = {f"/sys/bus/pci/devices/0000:05:00.0/{k}": f"{v}\n" for k, v in devices.items()}
    system = healthy(more=more, without=(CGROUP, *NO_SWITCH))
    assert bool(services.CHECK.run(system)) == wanted


def test_a_node_without_switches_wants_no_fabric_manager() -> None:
    """GPUs on PCIe: the driver is loaded and has no switch."""
    more = {"/sys/bus/pci/drivers/nvidia-nvswitch/bind": ""}
    assert services.CHECK.run(healthy(more=more, without=(CGROUP, *NO_SWITCH))) == []


@pytest.mark.parametrize(
    "path",
    [
        "/sys/fs/cgroup/system.slice/sssd.service/cgroup.procs",
        "/sys/fs/cgroup/systemd/system.slice/sssd.service/cgroup.procs",
        "/sys/fs/cgroup/unified/system.slice/sssd.service/cgroup.procs",
    ],
)
def test_a_required_unit_is_seen_in_its_cgroup(path: str) -> None:
    options = {"services": {"required": ["sssd"]}}
    assert services.CHECK.run(healthy(more={path: "812\n"}, options=options)) == []


@pytest.mark.parametrize(
    ("killed", "ago", "cls"),
    [("sssd", 600.0, "user"), ("other", 600.0, "node"), ("sssd", 7200.0, "node")],
)
def test_a_service_that_had_no_memory_left_is_no_nodes_fault(
    killed: str, ago: float, cls: str
) -> None:
    line = f"Out of memory: Killed process 71 ({killed}) total-vm:1kB, anon-rss:1kB"
    system = healthy(
        commands={show("sssd.service"): CommandOutput(0, said("loaded", "failed", "failed"), "")},
        options={"services": {"required": ["sssd"]}},
    )
    system.kmsg = log(line, level=3, time=UPTIME - ago)
    [finding] = services.CHECK.run(system)
    assert (finding.check, finding.cls) == ("service-down", cls)


def test_all_required_units_are_asked_for_at_once() -> None:
    options = {"services": {"required": ["sssd", "beegfs-client", "wrong", "chrony.service"]}}
    units = [f"{name}.service" for name in ("sssd", "beegfs-client", "wrong", "chrony")]
    answer = "\n".join(
        [
            said("loaded", "active", "running"),
            said("loaded", "failed", "failed"),
            said("not-found", "inactive", "dead"),
            said("loaded", "activating", "start"),
        ]
    )
    system = healthy(commands={show(*units): CommandOutput(0, answer, "")}, options=options)
    expected = [
        (FAIL, "service-down", "beegfs-client.service"),
        (FAIL, "service-down", "wrong.service"),
        (WARN, "service-unknown", "chrony.service"),
    ]
    assert ids(services.CHECK.run(system)) == expected
    system.fail["/proc"] = OSError(errno.EMFILE, "Too many open files")
    assert ids(services.CHECK.run(system)) == expected, "what was found before stays"


def test_an_answer_about_other_units_proves_nothing() -> None:
    options = {"services": {"required": ["sssd"]}}
    output = CommandOutput(1, "", "Failed to connect to bus")
    system = healthy(commands={show("sssd.service"): output}, options=options)
    assert ids(services.CHECK.run(system)) == [(WARN, "service-unknown", "sssd.service")]


@pytest.mark.parametrize("word", ["", "a b", "-x", "../x", "a;b"])
def test_a_name_that_is_no_unit(word: str) -> None:
    options = {"services": {"required": [word]}}
    assert ids(services.CHECK.run(healthy(options=options))) == [(WARN, "service-unknown", "")]


def test_modules() -> None:
    options = {"services": {"modules": ["nvidia-peermem", "gdrdrv"]}}
    more = {"/sys/module/nvidia_peermem/version": "1"}
    found = ids(services.CHECK.run(healthy(more=more, options=options)))
    assert found == [(FAIL, "module-missing", "gdrdrv")]


IMEX = "nvidia-imex.service"
ENABLED = {f"/etc/systemd/system/multi-user.target.wants/{IMEX}": f"/usr/lib/systemd/system/{IMEX}"}
RUNS = {f"/sys/fs/cgroup/system.slice/{IMEX}/cgroup.events": "populated 1\nfrozen 0\n"}
RECORDED = {"services": [IMEX]}
FAILED, STOPPED = ("loaded", "failed", "failed"), ("loaded", "inactive", "dead")
TOLD = [(WARN, "service-imex", IMEX)]


@pytest.mark.parametrize(
    ("links", "more", "answer", "fleet", "required", "found"),
    [
        ({}, {}, None, RECORDED, [], []),  # another kind of node
        (ENABLED, RUNS, None, RECORDED, [], []),
        (ENABLED, {}, STOPPED, {}, [], []),  # a prolog starts it, or this node is in no domain
        (ENABLED, {}, FAILED, {}, [], TOLD),
        (ENABLED, {}, ("loaded", "activating", "auto-restart"), {}, [], TOLD),
        (ENABLED, {}, STOPPED, RECORDED, [], TOLD),
        (ENABLED, {}, ("loaded", "activating", "start"), RECORDED, [], []),
        (ENABLED, {}, ("not-found", "inactive", "dead"), RECORDED, [], []),
        (ENABLED, {}, TimeoutError(errno.ETIMEDOUT, "did not end"), RECORDED, [], []),
        (ENABLED, {}, STOPPED, {"services": IMEX}, [], []),  # nothing usable was recorded
        (ENABLED, {}, STOPPED, {}, ["nvidia-imex"], [(FAIL, "service-down", IMEX)]),
    ],
)
def test_imex(
    links: dict[str, str], more: dict[str, str], answer: Any, fleet: dict[str, Any],
    required: list[str], found: list[Any],
) -> None:  # fmt: skip
    output = CommandOutput(0, said(*answer), "") if isinstance(answer, tuple) else answer
    commands = {show(IMEX): output} if output else {}
    options = {"services": {"required": required}}
    system = healthy(more=more, commands=commands, fleet=fleet, options=options)
    system.links |= links
    assert ids(services.CHECK.run(system)) == found


@pytest.mark.parametrize(
    ("loaded", "fleet", "modules", "found"),
    [
        (["nvidia"], {}, [], []),
        (["nvidia"], {"modules": []}, [], []),
        (["nvidia"], {"modules": ["nvidia_peermem"]}, [], [(WARN, "peermem-missing")]),
        (["nvidia"], {"modules": ["nv_peer_mem"]}, [], [(WARN, "peermem-missing")]),
        (["nvidia", "nvidia_peermem"], {"modules": ["nvidia_peermem"]}, [], []),
        (["nvidia", "nvidia_peermem"], {"modules": ["nv_peer_mem"]}, [], []),
        ([], {"modules": ["nvidia_peermem"]}, [], []),  # no GPU driver
        (["nvidia"], {"modules": "nvidia_peermem"}, [], []),
        (["nvidia"], {"modules": ["nvidia_peermem"]}, ["nvidia-peermem"],
         [(FAIL, "module-missing")]),
    ],
)  # fmt: skip
def test_peermem(
    loaded: list[str], fleet: dict[str, Any], modules: list[str], found: list[Any]
) -> None:
    more = {f"/sys/module/{name}/refcnt": "0\n" for name in loaded}
    options = {"services": {"modules": modules}}
    told = services.CHECK.run(healthy(more=more, fleet=fleet, options=options))
    assert [(f.status, f.check) for f in told] == found
    rdma = "/sys/class/infiniband/"
    no_ports = tuple(path for path in healthy().files if path.startswith(rdma))
    told = services.CHECK.run(healthy(more=more, without=no_ports, fleet=fleet, options=options))
    assert [f for f in told if f.status == WARN] == []


# --- clock --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "found"),
    [
        (0.0, []),
        (0.4, []),
        (-0.9, [(WARN, "clock-drift", "")]),
        (12.0, [(FAIL, "clock-wrong", "")]),
        (16.0, []),  # phc2sys: synchronised, and nobody ever set the estimate
        (16.9, [(WARN, "clock-drift", "")]),
        (400.0, [(FAIL, "clock-wrong", "")]),
        (None, [(WARN, "clock-unsynchronised", "")]),
    ],
)
def test_clock_offset(offset: float | None, found: list[Any]) -> None:
    assert ids(clock.CHECK.run(healthy(clock_offset=offset))) == found
    options = {"clock": {"synchronised": False}}
    assert clock.CHECK.run(healthy(clock_offset=offset, options=options)) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [("tsc", []), ("kvm-clock", []), ("hpet", [(WARN, "clocksource-slow", "")]), ("", [])],
)
def test_clock_source(source: str, found: list[Any]) -> None:
    path = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
    assert ids(clock.CHECK.run(healthy(more={path: source}))) == found


# --- cpu ----------------------------------------------------------------------------------------

CPU = "/sys/devices/system/cpu"


@pytest.mark.parametrize(
    ("more", "options", "found"),
    [
        ({"offline": "7\n", "online": "0-6,8-223\n"}, {}, [(WARN, "cpu-offline", "")]),
        ({"offline": "112-223\n", "online": "0-111\n", "smt/control": "off\n"}, {}, []),
        ({"offline": "224-511\n"}, {}, []),  # announced by firmware, not there
        ({}, {"governor": "performance"}, []),
        ({}, {"governor": "schedutil"}, [(WARN, "cpu-governor", "")]),
        ({"cpu0/cpufreq/scaling_governor": ""}, {"governor": "performance"}, []),  # a VM
        ({"cpu0/cpufreq/scaling_max_freq": "2000000\n"}, {}, [(WARN, "cpu-capped", "")]),
    ],
)
def test_cpu(more: dict[str, str], options: dict[str, Any], found: list[Any]) -> None:
    files = {f"{CPU}/{name}": value for name, value in more.items()}
    assert ids(cpu.CHECK.run(healthy(more=files, options={"cpu": options}))) == found


# --- slurmd -------------------------------------------------------------------------------------

CONF = "/etc/slurm/slurm.conf"
SOCKET = PathEntry("socket", 0o777, 0, 0, NOW)


def fail(code: int) -> OSError:
    return OSError(code, os.strerror(code))


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (fail(errno.EROFS), [(FAIL, "slurmd-spool", "")]),
        (fail(errno.EIO), [(FAIL, "slurmd-spool", "")]),
        (fail(errno.ENOSPC), [(FAIL, "slurmd-spool", "")]),
        (TimeoutError(errno.ETIMEDOUT, "no answer"), [(FAIL, "slurmd-spool", "")]),
        (fail(errno.ENOENT), []),  # slurmd has another one
    ],
)
def test_spool(error: OSError, found: list[Any]) -> None:
    judged = slurmd.CHECK.run(healthy(probes={SPOOL: error}))
    assert ids(judged) == found
    theirs = isinstance(error, TimeoutError) or error.errno == errno.ENOSPC
    assert all(one.cls == ("user" if theirs else "node") for one in judged)


@pytest.mark.parametrize(("code", "status"), [(errno.ETIMEDOUT, WARN), (errno.EROFS, FAIL)])
def test_a_running_jobs_own_writing_may_keep_the_spools_disk_busy(code: int, status: str) -> None:
    system = healthy(probes={SPOOL: fail(code)}, more={f"{SPOOL}/n1_55.0": ""})
    assert ids(slurmd.CHECK.run(system)) == [(status, "slurmd-spool", "")]


def test_a_spool_probe_that_could_not_start_is_the_tools_trouble() -> None:
    with pytest.raises(OSError, match="temporarily unavailable"):
        slurmd.CHECK.run(healthy(probes={SPOOL: fail(errno.EAGAIN)}))
    assert not slurmd.CHECK.closes_on_error


@pytest.mark.parametrize(
    ("auth", "socket"),
    [
        ("socket=/x/munge.sock", "/x/munge.sock"),
        ("cred_expire=5,socket=/x/munge.sock,ttl=60", "/x/munge.sock"),
        ("/old/form", "/old/form"),
        ("cred_expire=5", ""),
        ("", ""),
    ],
)
def test_munge_socket(auth: str, socket: str) -> None:
    assert slurmd.munge_socket({"authinfo": auth}) == socket


def test_the_socket_that_authinfo_names() -> None:
    conf = {CONF: SLURM_CONF + "AuthInfo=socket=/lab/munge.sock\n"}
    assert ids(slurmd.CHECK.run(healthy(more=conf))) == [(FAIL, "munge-missing", "")]
    assert slurmd.CHECK.run(healthy(more=conf, entries={"/lab/munge.sock": SOCKET})) == []
    other = {CONF: conf[CONF].replace("auth/munge", "auth/slurm")}
    assert slurmd.CHECK.run(healthy(more=other)) == []


def test_the_usual_socket_is_only_a_guess() -> None:
    system = healthy(dirs=["/run/munge"])
    del system.entries["/run/munge/munge.socket.2"]
    assert ids(slurmd.CHECK.run(system)) == [(WARN, "munge-missing", "")]
    del system.files["/run/munge/munged.pid"]
    system.dirs.discard("/run/munge")
    assert slurmd.CHECK.run(system) == []


@pytest.mark.parametrize(
    ("more", "others", "found"),
    [
        ({}, (), []),
        ({"/run/munge/munged.pid": "901\n"}, (), []),  # another munged runs
        ({"/proc/900/comm": "sh\n"}, (), [(FAIL, "munge-dead", "")]),
        ({"/proc/900/comm": "sh\n"}, (process(950, "munged"),), []),
        # A container: munged is in another one, and its pid means nothing here.
        ({"/proc/900/comm": "sh\n", "/proc/1/comm": "slurmd\n"}, (), []),
    ],
)
def test_a_munged_that_died(more: dict[str, str], others: Any, found: list[Any]) -> None:
    assert ids(slurmd.CHECK.run(healthy(others, more=more))) == found


@pytest.mark.parametrize(("killed", "cls"), [(900, "user"), (70, "node")])
def test_only_a_munged_that_was_killed_itself_had_no_memory_left(killed: int, cls: str) -> None:
    """An earlier one was killed for memory, and started anew."""
    system = healthy(more={"/proc/900/comm": "sh\n"})
    system.kmsg = log(f"Out of memory: Killed process {killed} (munged) total-vm:1kB", level=3)
    [finding] = slurmd.CHECK.run(system)
    assert (finding.check, finding.cls) == ("munge-dead", cls)


def test_processes_that_cannot_be_listed_say_nothing_about_munged() -> None:
    """Nor is a finding of before lost."""
    system = healthy(more={"/proc/900/comm": "sh\n"})
    system.fail["/proc"] = OSError(errno.EMFILE, "Too many open files")
    assert slurmd.CHECK.run(system) == []


@pytest.mark.parametrize(
    ("hosts", "address"),
    [
        ("127.0.0.1 localhost\n10.0.0.11 n1 n1.cluster\n", ""),
        ("127.0.1.1 n1.cluster n1\n", "127.0.1.1"),
        ("127.0.1.1 n1\n10.0.0.11 n1\n", ""),
        ("::1 n1\n", "::1"),
        ("# 127.0.1.1 n1\n127.0.1.1 n10\n", ""),
        ("", ""),
    ],
)
def test_loopback_only(hosts: str, address: str) -> None:
    assert slurmd.loopback_only(hosts, "n1") == address
    found = [(WARN, "hostname-loopback", "")] if address else []
    assert ids(slurmd.CHECK.run(healthy(more={"/etc/hosts": hosts}))) == found


@pytest.mark.parametrize(
    ("comm", "where", "found"),
    [
        ("slurmd\n", "deep", []),
        ("sh\n", "deep", [(WARN, "slurmd-gone", "")]),
        ("sh\n", "prolog", []),  # slurmd itself called
    ],
)
def test_the_process_of_slurmd(comm: str, where: str, found: list[Any]) -> None:
    more = {
        CONF: SLURM_CONF + "SlurmdPidFile=/run/slurmd-%n.pid\n",
        "/run/slurmd-n1.pid": "777\n",
        "/proc/777/comm": comm,
    }
    assert ids(slurmd.CHECK.run(healthy(more=more, context=context(where)))) == found
