"""Checks that ask a node's tools, services and buses, seen through robust-health on a real node.

Programs, devices and files of the kernel and of systemd are emulated: they lie over the real ones
for one command, in a mount namespace of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from gate_lab import GateLab, gate_lab

FAMILIES = "nvme_smart,bmc,topology,services"
TOP = "/run/emulated"
TOOLS = ("nvme", "smartctl", "ipmitool", "systemctl")
LIMIT_MS = 8000.0  # the longest deadline of these families; they run side by side
PEERMEM, NUMA = "/sys/module/nvidia_peermem", "/sys/bus/pci/devices/0000:1b:00.0/numa_node"

MADE = f"""
mkdir -p {TOP}/bin {TOP}/dev {TOP}/etc/systemd/system/multi-user.target.wants
mknod {TOP}/dev/ipmi0 c 240 0
ln -s /lib/systemd/system/nvidia-imex.service {TOP}/etc/systemd/system/multi-user.target.wants/
echo systemd > {TOP}/comm
mkdir {PEERMEM} /sys/class/nvme /sys/class/nvme/nvme0
echo live > /sys/class/nvme/nvme0/state
echo pcie > /sys/class/nvme/nvme0/transport
"""
LOOKED = f"""
for place in bin sbin; do
    mount -t overlay none -o lowerdir={TOP}/bin:/usr/$place /usr/$place
done
for place in dev etc; do
    mount -t overlay none -o lowerdir={TOP}/$place:/$place /$place
done
[ -z "$SYSTEMD" ] || mount --bind {TOP}/comm /proc/1/comm
exec robust-health check --config $CONFIG --only {FAMILIES} --json
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
        record = ["robust-health", "baseline", "--host", "--config", config(made)]
        made.lab.exec("n1", record, user=False, check=True)
        yield made


def config(site: GateLab) -> str:
    return str(site.etc / "robust.toml")


def look(site: GateLab, tools: dict[str, str], systemd: str = "yes") -> list[tuple[str, str]]:
    """Findings of `robust-health check` with these tools, the others hidden; none may close."""
    lines = [f"rm -f {TOP}/bin/*; cd {TOP}/bin"]
    for name in TOOLS:
        # A device 0, 0 in a layer hides what lies below it.
        write = f"cat > {name} <<'END'\n#!/bin/sh\n{tools.get(name)}\nEND\nchmod 755 {name}"
        lines.append(write if name in tools else f"mknod {name} c 0 0")
    site.lab.exec("n1", ["sh", "-ec", "\n".join(lines)], user=False, check=True)
    env = {"CONFIG": config(site), "SYSTEMD": systemd}
    argv = ["unshare", "-m", "sh", "-ec", LOOKED]
    done = site.lab.exec("n1", argv, user=False, env=env, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["total_ms"] < LIMIT_MS and not report["verdict"]["closed"]
    assert {row["family"] for row in report["ran"]} == set(FAMILIES.split(","))
    assert {finding["status"] for finding in report["findings"]} <= {"WARN"}, report["findings"]
    return sorted((finding["check"], finding["device"]) for finding in report["findings"])


def test_a_node_that_is_well(site: GateLab) -> None:
    assert look(site, WELL) == []


def test_tools_that_are_not_installed(site: GateLab) -> None:
    assert look(site, {}, systemd="") == []


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
