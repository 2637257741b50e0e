"""Processes and memory on GPUs that should be free.

Which GPUs should be free: in a job's prolog and epilog those of the job (SLURM_JOB_GPUS); all of
them when no other job has a step on the node. A process of a job that runs here is no leftover,
nor is a service of root's named in ``services``. A process whose job is unknown is not reported on
a GPU that need not be free. What a process's environment says of its job counts only for a process
of that job's user: anybody can write it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from health.check import Check, Condition, Setting
from health.children.call import call_in_child
from health.finding import Finding
from health.node import jobs, proctable, slurmconf, sysfs
from health.node.gpu_snapshot import Device
from health.node.system import System
from health.nvidia import gpus
from robust_slurm.text import one_line

PROCESS = Condition(
    "gpu-process-left",
    "FAIL",
    "user",
    "clear-leftovers",
    "a process of no running job is on a GPU that should be free",
)
FOREIGN = Condition(
    "gpu-process-foreign",
    "WARN",
    "user",
    "none",
    "a process of another running job is on a GPU of this job",
)
MEMORY = Condition(
    "gpu-memory-left",
    "FAIL",
    "user",
    "reset-gpu",
    "more than `memory` is in use on a GPU without processes (a WARN on Grace, where the kernel "
    "itself uses it); a descriptor of a user's, which no list shows, can hold it",
)
UNREADABLE = Condition(
    "gpu-use-unreadable",
    "ERROR",
    "node",
    "reboot",
    "NVML did not report processes or memory in use",
)

SETTINGS = {
    "memory": Setting(1024, "tolerated memory use without a process", "MiB"),
    "services": Setting(
        [
            "nv-hostengine",
            "dcgm-exporter",
            "nvidia-cuda-mps",
            "nvidia-persiste",
            "Xorg",
            "gnome-shell",
        ],
        "name prefixes of root's processes that may stay on a GPU",
    ),
}

_CLAIM_S = 0.3  # to read a process's environment
PAUSE_S = 0.2  # between two looks at a process that is ending
ENDING_S, PROLOG_S = 3.0, 1.5  # for all of them to give back the GPUs
_MIB = 1 << 20
_COHERENT = re.compile(r"\bG[HB][23]00\b")  # its memory is one of the kernel's NUMA nodes
_UID = re.compile(r"^Uid:\s*(\d+)", re.MULTILINE)
_ENVIRON_JOB = re.compile(r"(?:^|\0)SLURM_JOB_ID=(\d{1,10})(?:\0|$)")
_MINOR = re.compile(r"Device Minor:\s*(\d+)")


def run(system: System) -> list[Finding]:
    """Findings about the GPUs that have something on them; nothing is read where none has."""
    options = system.options("gpu_leftovers")
    limit = options["memory"] * _MIB
    devices = gpus.devices(system)
    found: list[Finding] = []
    for device in devices:
        board = gpus.identity(device)
        found += gpus.unreadable(UNREADABLE, device, "processes", "memory", board=board)
    used = [
        device
        for device in devices
        if device.get("processes") or device.get("memory", {}).get("used", 0) > limit
    ]
    return found + (_Look(system, options).run(used) if used else [])


class _GpuProcess(NamedTuple):
    pid: int
    uid: int
    comm: str  # what it calls itself
    job: int  # 0: none; UNKNOWN (-1): one that has no step here
    proven: bool  # from its cgroup, or it is below the job's slurmstepd


class _Look:
    """One look at the GPUs' processes and memory, judged by what may be there in this context."""

    def __init__(self, system: System, options: Mapping[str, Any]):
        self.system, self.options = system, options
        self.owners = proctable.Jobs(system)
        self.job = system.context.job
        self.ending = system.context.where == "epilog"
        self.others = jobs.running(system)  # None: unknown
        self.alone = self.others is not None and not self.others
        self.own = allocated(system)
        self.patience = PROLOG_S if system.context.where == "prolog" else ENDING_S

    def run(self, used: list[Device]) -> list[Finding]:
        found = []
        for device in used:
            free = self.alone or device.get("index") in self.own
            states = [
                (process, self._state(process, free))
                for entry in device.get("processes", [])
                if (process := self._process(entry["pid"]))
            ]
            for process, state in states:
                condition = {"left": PROCESS, "foreign": FOREIGN}.get(state)
                if condition and not self._goes(process.pid):
                    said = _text(device, process)
                    found.append(condition.found(said, gpus.name(device), uid=process.uid))
            if free and not device.get("processes"):  # else it is theirs, also if they ended since
                found += self._memory(device)
        return found

    def _goes(self, pid: int) -> bool:
        """Wait for a process that is ending; True once it is gone."""
        while process := proctable.one(self.system, pid):
            if process.ended:
                return True
            if self.patience <= 0 or not proctable.ending(self.system, process):
                return False
            proctable.pause(self.system, PAUSE_S)
            self.patience -= PAUSE_S
        return self._process(pid) is None

    def _process(self, pid: int) -> _GpuProcess | None:
        """None: it has ended."""
        found = _process(self.system, pid, self.owners)
        if found is None or found.job:
            return found
        above = proctable.stepd_above(self.system, pid)
        if above > 0:
            return found._replace(job=above, proven=True)
        claim = _claim(self.system, pid)
        context = self.system.context
        owned = claim > 0 and (
            found.uid == context.uid
            if claim == context.job
            else found.uid in proctable.users(self.system, claim)
        )
        return found._replace(job=claim) if owned else found

    def _state(self, process: _GpuProcess, free: bool) -> str:
        """ "left", "foreign" (another running job's on this job's GPU), or "right"."""
        services = tuple(self.options["services"])
        if process.uid == 0 and services and process.comm.startswith(services):
            return "right"
        if process.job and process.job == self.job:
            return "left" if self.ending else "right"
        if process.job and self.others is not None:
            if process.job in self.others:
                return "foreign" if free else "right"
            if process.proven:
                return "left"
        return "left" if free else "right"

    def _memory(self, device: Device) -> list[Finding]:
        used, limit = device["memory"]["used"], self.options["memory"]
        text = f"{used // _MIB} MiB in use and no process, limit {limit} MiB"
        coherent = _COHERENT.search(device.get("name", ""))
        return [
            MEMORY.found(
                f"{text}{gpus.identity(device)} (NVML memory)",
                gpus.name(device),
                status="WARN" if coherent else None,
            )
        ]


def _text(device: Device, process: _GpuProcess) -> str:
    job = f"job {process.job}" if process.job > 0 else "a job that has no step here"
    job = job if process.job else "no job"
    comm = one_line(process.comm, 16).replace('"', "?")
    return (
        f'process {process.pid} "{comm}" of uid {process.uid}, {job}, is on a GPU that should '
        f"be free{gpus.identity(device)} (NVML processes)"
    )


def _process(system: System, pid: int, owners: proctable.Jobs) -> _GpuProcess | None:
    """None: it has ended."""
    try:
        # Not the owner of /proc/PID: that is root for a process that hides itself.
        uid = _UID.search(system.read(f"/proc/{pid}/status"))
        comm = system.read(f"/proc/{pid}/comm").strip()
        job = owners.of(system.read(f"/proc/{pid}/cgroup"))
    except OSError:
        return None
    return _GpuProcess(pid, int(uid[1]) if uid else -1, comm, job or 0, job is not None)


def _claim(system: System, pid: int) -> int:
    """The job that the process's environment names; 0: none.

    Read in a child: the process's memory may be a file of its user's own file system.
    """
    said, _ = call_in_child(lambda: system.read(f"/proc/{pid}/environ"), _CLAIM_S)
    match = _ENVIRON_JOB.search(said or "")
    return int(match[1]) if match else 0


def allocated(system: System) -> set[int]:
    """NVML's numbers of the GPUs that this job has; empty if Slurm does not say.

    SLURM_JOB_GPUS numbers the node's GPUs in the order of gres.conf; their device files have the
    driver's minor numbers, and /proc/driver/nvidia/gpus tells which PCI address has which.
    """
    text = system.context.env.get("SLURM_JOB_GPUS", "")
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
        return set()
    try:
        files = slurmconf.gpu_files(system)
    except (OSError, ValueError):
        files = []
    minors = {_minor(files, int(number)) for number in text.split(",")}
    out = set()
    for device in gpus.devices(system):
        index = device.get("index", -1)
        if _driver_minor(system, device, index) in minors:
            out.add(index)
    return out


def _minor(files: list[str], number: int) -> int:
    digits = re.search(r"\d+$", files[number]) if number < len(files) else None
    return int(digits[0]) if digits else number


def _driver_minor(system: System, device: Device, otherwise: int) -> int:
    place = f"/proc/driver/nvidia/gpus/{device.get('pci', '')}"
    match = _MINOR.search(sysfs.text(system, f"{place}/information"))
    return int(match[1]) if match else otherwise


CHECK = Check(
    "gpu_leftovers",
    run,
    (PROCESS, FOREIGN, MEMORY, UNREADABLE),
    SETTINGS,
    needs_nvml=True,
    cost_ms=0.1,
    deadline_s=ENDING_S + 2.0,
)
