"""Checks that ask a node's tools, services and buses, seen through robust-health on a real node.

Programs, devices and files of the kernel and of systemd are emulated: they lie over the real ones
for one command, in a mount namespace of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from subprocess import CompletedProcess
from typing import Any

import pytest
from gate_lab import GateLab, gate_lab

FAMILIES = "nvme_smart,bmc,topology,services"
TOP = "/run/emulated"
TOOLS = ("nvme", "smartctl", "ipmitool", "systemctl")
LIMIT_MS = 8000.0  # the longest deadline of these families; they run side by side
PCI = "/sys/bus/pci/devices"
PEERMEM, NUMA = "/sys/module/nvidia_peermem", f"{PCI}/0000:1b:00.0/numa_node"
# Two adapters on the bridges of the two GPUs: each is the nearest to one of them.
NEAR = {"0000:18:00.0": "pci0000:1a/0000:1a:01.0", "0000:40:00.0": "pci0000:42/0000:42:01.0"}
FAR = dict(zip(NEAR, reversed(NEAR.values()), strict=True))  # they have changed places

MADE = f"""
mkdir -p {TOP}/bin {TOP}/dev {TOP}/etc/systemd/system/multi-user.target.wants
mknod {TOP}/dev/ipmi0 c 240 0
ln -s /lib/systemd/system/nvidia-imex.service {TOP}/etc/systemd/system/multi-user.target.wants/
echo systemd > {TOP}/comm
mkdir {PEERMEM} /sys/class/nvme /sys/class/nvme/nvme0
echo live > /sys/class/nvme/nvme0/state
echo pcie > /sys/class/nvme/nvme0/transport
"""
IN_PLACE = f"""
for place in bin sbin; do
    mount -t overlay none -o lowerdir={TOP}/bin:/usr/$place /usr/$place
done
for place in dev etc; do
    mount -t overlay none -o lowerdir={TOP}/$place:/$place /$place
done
[ -z "$SYSTEMD" ] || mount --bind {TOP}/comm /proc/1/comm
mount -t tmpfs none /sys/devices/system
mkdir /sys/devices/system/node
echo $PROCESSORS > /sys/devices/system/node/has_cpu
mount -t tmpfs none /sys/fs/cgroup
if [ -n "$IMEX" ]; then
    mkdir -p /sys/fs/cgroup/system.slice/nvidia-imex.service
    echo "populated 1" > /sys/fs/cgroup/system.slice/nvidia-imex.service/cgroup.events
fi
exec robust-health "$@" --config $CONFIG
"""
SMART = '{"critical_warning":%d,"avail_spare":100,"percent_used":%d,"media_errors":%d}'
# As ipmitool 1.8.19 prints it.
IPMI = """case "$*" in
"chassis status") printf 'System Power         : on\\nCooling/Fan Fault    : {fault}\\n' ;;
"sel info") printf 'SEL Information\\nEntries          : 512\\nOverflow         : {fault}\\n' ;;
*) echo "  32 | $(date -u +%m/%d/%Y) | 15:02:11 | {event} | Asserted" ;;
esac
"""
UNITS = """for unit; do case $unit in
nvidia-imex.service) printf 'LoadState=loaded\\nActiveState={imex}\\nSubState={imex}\\n\\n' ;;
*.service) printf 'LoadState=loaded\\nActiveState=active\\nSubState=running\\n\\n' ;;
esac; done
"""
WELL = {
    "nvme": f"echo '{SMART % (0, 3, 0)}'",
    "ipmitool": IPMI.format(fault="false", event="Power Supply #0x64 | Presence detected"),
    "systemctl": UNITS.format(imex="active"),
}
BAD = {
    "nvme": f"echo '{SMART % (4, 101, 11)}'",
    "ipmitool": IPMI.format(fault="true", event="Power Supply #0x64 | Failure detected"),
    "systemctl": UNITS.format(imex="failed"),
}


@pytest.fixture(scope="module")
def site() -> Iterator[GateLab]:
    """One node, well, with a fleet's record that was taken from it."""
    with gate_lab(nodes=1) as made:
        made.lab.exec("n1", ["sh", "-ec", MADE], user=False, check=True)
        adapters(made, NEAR)
        record(made)
        yield made


def adapters(site: GateLab, places: dict[str, str]) -> None:
    """Put adapters, by their addresses, below these bridges."""
    lines = []
    for address, above in places.items():
        place = f"/sys/devices/{above}/{address}"
        lines.append(
            f"mkdir -p {place}; echo 0 > {place}/numa_node; ln -sfn {place} {PCI}/{address}"
        )
    site.lab.exec("n1", ["sh", "-ec", "\n".join(lines)], user=False, check=True)


def health(site: GateLab, *words: str, **env: str) -> CompletedProcess[str]:
    """Run robust-health among what is emulated."""
    given = {"CONFIG": str(site.etc / "robust.toml"), "SYSTEMD": "yes", "PROCESSORS": "0-1"}
    argv = ["unshare", "-m", "sh", "-ec", IN_PLACE, "sh", *words]
    done = site.lab.exec("n1", argv, user=False, env=given | {"IMEX": ""} | env, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def record(site: GateLab, imex: str = "runs") -> None:
    """Take the fleet's record from the node."""
    health(site, "baseline", "--host", IMEX=imex)


def look(site: GateLab, tools: dict[str, str], **env: str) -> list[tuple[str, str]]:
    """Findings of `robust-health check` with these tools, the others hidden; none may close."""
    lines = [f"rm -f {TOP}/bin/*; cd {TOP}/bin"]
    for name in TOOLS:
        # A device 0, 0 in a layer hides what lies below it.
        write = f"cat > {name} <<'END'\n#!/bin/sh\n{tools.get(name)}\nEND\nchmod 755 {name}"
        lines.append(write if name in tools else f"mknod {name} c 0 0")
    site.lab.exec("n1", ["sh", "-ec", "\n".join(lines)], user=False, check=True)
    done = health(site, "check", "--only", FAMILIES, "--json", **env)
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["total_ms"] < LIMIT_MS and not report["verdict"]["closed"]
    assert {row["family"] for row in report["ran"]} == set(FAMILIES.split(","))
    assert {finding["status"] for finding in report["findings"]} <= {"WARN"}, report["findings"]
    return sorted((finding["check"], finding["device"]) for finding in report["findings"])


def test_a_node_that_is_well(site: GateLab) -> None:
    assert look(site, WELL) == []


def test_tools_that_are_not_installed(site: GateLab) -> None:
    assert look(site, {}, SYSTEMD="") == []


def test_tools_that_hang(site: GateLab) -> None:
    """Each is given up within its time; that IMEX cannot be asked about is no finding."""
    found = look(site, dict.fromkeys(TOOLS, "exec sleep 60"))
    assert found == [
        ("bmc-unread", ""),
        ("nvme-smart-unread", "nvme0"),
        ("service-unknown", "nvidia-fabricmanager.service"),
    ]
    assert not [words for _, words in site.processes("n1") if words == "sleep 60"]


def test_what_they_report_is_told(site: GateLab) -> None:
    site.lab.exec("n1", ["sh", "-ec", f"rmdir {PEERMEM}; echo 1 > {NUMA}"], user=False, check=True)
    assert look(site, BAD) == [
        ("bmc-chassis", ""),
        ("bmc-event", ""),
        ("bmc-log-full", ""),
        ("nvme-media-errors", "nvme0"),
        ("nvme-warning", "nvme0"),
        ("nvme-worn", "nvme0"),
        ("peermem-missing", "nvidia_peermem"),
        ("service-imex", "nvidia-imex.service"),
        ("topology-numa", ""),
    ]
    back = f"mkdir {PEERMEM}; echo 0 > {NUMA}"
    site.lab.exec("n1", ["sh", "-ec", back], user=False, check=True)


def test_an_adapter_that_is_farther_away_than_the_fleet_recorded(site: GateLab) -> None:
    adapters(site, FAR)
    assert look(site, WELL) == [("topology-adapters", "")]
    adapters(site, NEAR)
    assert look(site, WELL) == []


def test_processors_at_other_nodes_than_the_fleet_recorded(site: GateLab) -> None:
    """NPS or SNC was changed in the firmware."""
    assert look(site, WELL, PROCESSORS="0-3") == [("topology-processors", "")]


def test_imex_that_stopped_counts_where_the_fleet_recorded_it(site: GateLab) -> None:
    stopped = {**WELL, "systemctl": UNITS.format(imex="inactive")}
    assert look(site, stopped) == [("service-imex", "nvidia-imex.service")]
    assert look(site, stopped, IMEX="runs") == []
    record(site, imex="")
    assert look(site, stopped) == []  # a prolog may start it
    record(site)
