"""The hardware of a lab's node as it shows: by pynvml, files, the kernel's log, and processes."""

from __future__ import annotations

import json
from typing import Any

from waiting import until

from lab import Lab

GPUS = "/sys/bus/pci/devices"
BUSES = ["1b", "43", "52", "61", "9d", "c3", "d1", "df"]

# Says what NVML says of every GPU; a GPU without a handle, or that fails, is its error's text.
LOOK = """
import json, pynvml as N
N.nvmlInit()
out = []
for i in range(N.nvmlDeviceGetCount()):
    try:
        h = N.nvmlDeviceGetHandleByIndex(i)
        out.append({
            "uuid": N.nvmlDeviceGetUUID(h),
            "bus": N.nvmlDeviceGetPciInfo(h).busId,
            "ecc": [N.nvmlDeviceGetTotalEccErrors(h, 1, c) for c in (0, 1)],
            "remap": N.nvmlDeviceGetRemappedRows(h),
            "width": N.nvmlDeviceGetCurrPcieLinkWidth(h),
            "temp": N.nvmlDeviceGetTemperatureV(h, 0),
            "throttle": N.nvmlDeviceGetCurrentClocksEventReasons(h),
            "action": N.nvmlDeviceGetFieldValues(h, [230])[0].value.uiVal,
            "links": sum(N.nvmlDeviceGetNvLinkState(h, k) for k in range(18)),
        })
    except N.NVMLError as error:
        out.append(str(error))
print(json.dumps([N.nvmlSystemGetDriverVersion(), out]))
"""
WELL = {"ecc": [0, 0], "remap": [0, 0, 0, 0], "width": 16, "temp": 34, "throttle": 1, "action": 0,
        "links": 18}  # fmt: skip
ASK = "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())"


def python(lab: Lab, node: str, code: str) -> str:
    return lab.exec(node, ["python", "-c", code], check=True).stdout


def look(lab: Lab, node: str = "n1") -> list[Any]:
    gpus: list[Any] = json.loads(python(lab, node, LOOK))[1]
    return gpus


def differs(gpu: Any) -> dict[str, Any]:
    """Return the parts of a GPU that differ from a healthy one."""
    assert isinstance(gpu, dict), gpu
    return {key: value for key, value in gpu.items() if key in WELL and value != WELL[key]}


def all_well(lab: Lab, node: str = "n1") -> bool:
    return [differs(gpu) for gpu in look(lab, node)] == [{}] * len(BUSES)


def cat(lab: Lab, path: str, node: str = "n1") -> str:
    return lab.exec(node, ["cat", path], check=True).stdout.strip()


def log(lab: Lab, node: str = "n1") -> list[str]:
    """The lines of the node's kernel log."""
    return cat(lab, "/dev/kmsg", node).splitlines()


def free(lab: Lab, path: str, node: str = "n1") -> list[int]:
    """Size and free bytes of a path's file system."""
    argv = ["stat", "-f", "-c", "%S %b %a", path]
    size, blocks, available = map(int, lab.exec(node, argv, check=True).stdout.split())
    return [size * blocks, size * available]


class Running:
    """A command that hangs in a node; at the latest `heal` ends it."""

    def __init__(self, lab: Lab, node: str, argv: list[str], **popen: Any) -> None:
        self.lab, self.node, self.argv = lab, node, argv
        self.process = lab.popen(node, argv, user=False, text=True, **popen)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.lab.heal(self.node)
            self.process.kill()
        self.process.communicate(timeout=10)

    def _row(self) -> tuple[int, str]:
        """Return the process's pid in the node and its state; 0 if the process is not there."""
        argv = ["ps", "-eo", "pid,stat,args"]
        for line in self.lab.exec(self.node, argv, user=False, check=True).stdout.splitlines()[1:]:
            pid, state, args = line.split(None, 2)
            if args == " ".join(self.argv):
                return int(pid), state[0]
        return 0, ""

    @property
    def pid(self) -> int:
        return self._row()[0]

    @property
    def state(self) -> str:
        return self._row()[1]

    def wait_state(self, state: str) -> None:
        until(lambda: self.state == state, f"state {state}", 20)

    def wait_blocked(self, number: int) -> None:
        """Wait until it has blocked a signal."""

        def blocked() -> int:
            argv = ["grep", "SigBlk", f"/proc/{self.pid}/status"]
            return int(self.lab.exec(self.node, argv, check=True).stdout.split()[1], 16)

        until(lambda: self.pid != 0, "its process", 20)
        until(lambda: blocked() & (1 << (number - 1)) != 0, f"mask with signal {number}", 20)

    def kill(self, number: str) -> None:
        """A signal to the command itself, from inside the node."""
        self.lab.exec(self.node, ["kill", number, str(self.pid)], user=False, check=True)
