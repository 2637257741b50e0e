"""A node's hardware in the keeper's hands: break it, mend it, report what is broken.

The files are in the node's own tmpfs, reached through /proc/PID/root; what has to happen inside
the node's mount namespace is done by a short-lived child.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lab import inside, linux
from lab.errors import LabError
from lab.machine import gpu_faults, kernlog
from lab.machine.hardware import (
    HCAS,
    Hardware,
    Link,
    Tree,
    changes,
    nvml_state,
    proc_tree,
    sys_tree,
)
from lab.machine.kernlog import Line
from lab.machine.plant import write_entry
from lab.machine.stale import Mount
from lab.spec import LabSpec

_FILL = ".lab-fill"


class Gear:
    """The hardware of one node, from one boot to the next."""

    def __init__(self, spec: LabSpec, node: str, age: float) -> None:
        """``age``: seconds since its boot."""
        self.spec = spec
        self.pid = 0
        self.hardware = Hardware(node, spec.gpus)
        # Without time namespaces the node has the machine's uptime, and so has its log.
        booted = time.clock_gettime(time.CLOCK_BOOTTIME) - age
        self.began = booted if linux.has_own_uptime() else 0.0
        self.logged = len(kernlog.boot_log(spec.gpus))
        self.introduced: set[int] = set()  # GPUs of which the driver has printed the UUID
        self.full: dict[str, str] = {}  # path: its file system's size before, "" if it stayed
        self.mounts: dict[str, Mount] = {}

    def booted(self, pid: int) -> None:
        """Begin work on a booted node: `pid` is its first process, and its view is built."""
        self.pid = pid
        if self.spec.scratch:
            self._mount(str(self.spec.scratch_dir))

    def end(self) -> None:
        """End the mounts of a dying node, so that processes waiting for them can die."""
        for mount in self.mounts.values():
            mount.end()
        self.mounts.clear()

    @property
    def faults(self) -> list[str]:
        """The broken parts: "gpu3", "nvml", "mlx5_0", "full:/tmp", "stale:/scratch"."""
        keys = {key.partition(".")[0] for key in self.hardware.nvml}
        gpus = sorted(key for key in keys if key.startswith("gpu"))
        found = [*gpus, *(["nvml"] if keys - set(gpus) else []), *sorted(self.hardware.down)]
        found += [f"full:{path}" for path in self.full]
        found += [f"stalled:{path}" for path, mount in self.mounts.items() if mount.stalled]
        stale = [path for path, mount in self.mounts.items() if mount.stale]
        return found + [f"stale:{path}" for path in stale if path != self._stuck_dir]

    # -- requests ---------------------------------------------------------------------------

    def serve(self, request: dict[str, Any]) -> None:
        """Do what a request on the control socket says."""
        op = request["op"]
        if op == "gpu":
            self.gpu(request["index"], [(str(w), str(v)) for w, v in request["changes"]])
        elif op == "link":
            self.link(str(request["port"]), bool(request["up"]))
        elif op == "kmsg":
            self.kmsg(str(request["text"]), int(request["level"]))
        elif op == "fill":
            self.fill(_absolute(request["path"]), str(request["leave"]))
        elif op == "stale_mount":
            self.stale_mount(_absolute(request["path"]))
        elif op == "heal_mount":
            self.heal_mount(_absolute(request["path"]))
        else:
            raise LabError(f"the lab knows no {op!r}")

    def gpu(self, index: int | None, wanted: Iterable[tuple[str, str]]) -> None:
        """Change GPU `index`, or what is the node's (None), as gpu_faults.change() says."""
        try:
            for what, value in wanted:
                self._change(index, what, value)
        finally:
            self._end_stuck()

    def _change(self, index: int | None, what: str, value: str) -> None:
        at = self._stuck() if (what, value) == ("nvml_hang", "dstate") else value
        change = gpu_faults.change(self.hardware, index, what, at)
        self._become(self.hardware.with_nvml(change.nvml))
        if index is None:
            return
        if what == "reset":
            self.introduced.discard(index)
        if change.log and index not in self.introduced:
            self.introduced.add(index)
            self.log(kernlog.introduction(self.hardware.node, index))
        self.log(change.log)

    def link(self, port: str, up: bool) -> None:
        """Take the port of an HCA down or up."""
        if not self.spec.gpus:
            raise LabError("the lab has no InfiniBand; bring one up with --gpus N")
        if port not in HCAS:
            raise LabError(f"no port {port!r}; there are: {' '.join(HCAS)}")
        if (port in self.hardware.down) == up:
            self._become(self.hardware.with_port(port, up))
            self.log([kernlog.link(port, up)])

    def kmsg(self, text: str, level: int) -> None:
        if not 0 <= level <= 7 or not text or "\n" in text:
            raise LabError("a message of the kernel is one line, with a level from 0 to 7")
        self.log([Line(level, text)])

    def fill(self, path: str, leave: str) -> None:
        """Fill the file system of a path but for `leave` (bytes, or "N%" of its size)."""
        own = ["/tmp", "/dev/shm", str(self.spec.spool)]
        old = inside.run(self.pid, lambda: inside.fill(path, _FILL, leave, own))
        self.full[path] = self.full.get(path) or old

    def stale_mount(self, path: str) -> None:
        """Make the mount at `path` stop answering; if there is none, make one first."""
        if path not in self.mounts:
            self._mount(path)
        self.mounts[path].make_stale()

    def mounted(self, path: str) -> Mount:
        """Return the mount at a path; LabError if it is none of the lab's."""
        if path not in self.mounts:
            raise LabError(f"{path} is no mount of the lab's in {self.hardware.node}")
        return self.mounts[path]

    def heal_mount(self, path: str) -> None:
        """End a stale mount: waiting processes get an error. The scratch is mounted anew."""
        self.mounted(path).take_away(self.pid)
        del self.mounts[path]
        if self.spec.scratch and path == str(self.spec.scratch_dir):
            self._mount(path)

    def heal(self) -> None:
        """Undo everything but what the kernel's log says."""
        for mount in self.mounts.values():
            mount.stall(False)
        for path in [path for path, mount in self.mounts.items() if mount.stale]:
            if path != self._stuck_dir:
                self.heal_mount(path)
        while self.full:
            path, old = self.full.popitem()
            inside.run(self.pid, lambda: inside.unfill(path, _FILL, old))  # noqa: B023 - at once
        for port in sorted(self.hardware.down):
            self.link(port, True)
        if self.hardware.nvml:
            self.gpu(None, [("heal", "")])

    # -- doing it ---------------------------------------------------------------------------

    @property
    def _own(self) -> Path:
        """The node's own tmpfs, as the keeper reaches it."""
        return Path(f"/proc/{self.pid}/root{self.spec.node_dir}")

    def log(self, lines: list[Line]) -> None:
        """Add messages to the node's kernel log, with the time of now."""
        if not lines:
            return
        now = time.clock_gettime(time.CLOCK_BOOTTIME) - self.began
        text = kernlog.records(lines, self.logged, int(now * 1e6), 1)
        fd = os.open(self._own / "kmsg", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.write(fd, text.encode())
        os.close(fd)
        self.logged += len(lines)

    def _become(self, new: Hardware) -> None:
        old, self.hardware = self.hardware, new
        self._write(self._own / "gpu" / "nvml.state", nvml_state(new))
        self._rewrite(self._own / "sys", sys_tree(old), sys_tree(new))
        self._rewrite(self._own / "proc", proc_tree(old), proc_tree(new))

    def _rewrite(self, top: Path, old: Tree, new: Tree) -> None:
        for path, value in changes(old, new):
            target = top / path
            if value is None:
                target.unlink()
                _remove_empty(target.parent, top)
            else:
                target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                self._write(target, value)

    def _write(self, target: Path, value: str | Link) -> None:
        """Replace a file at once: no reader sees half of it."""
        fresh = self._own / "fresh"
        write_entry(fresh, value)
        fresh.rename(target)

    def _mount(self, path: str) -> None:
        self.mounts[path] = Mount.make(self.pid, path, str(self.spec.node_dir))

    @property
    def _stuck_dir(self) -> str:
        return str(self.spec.node_dir / "stuck")

    def _stuck(self) -> str:
        """Return a file on a separate stale mount, for NVML to hang on.

        Its type is not one that checks take for a network file system.
        """
        place = self._stuck_dir
        if place not in self.mounts:
            own = str(self.spec.node_dir)
            self.mounts[place] = Mount.make(self.pid, place, own, "fuse")
            self.mounts[place].make_stale()
        return f"{place}/nvidiactl"

    def _end_stuck(self) -> None:
        used = any(value.startswith(self._stuck_dir) for value in self.hardware.nvml.values())
        if self._stuck_dir in self.mounts and not used:
            self.heal_mount(self._stuck_dir)


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise LabError(f"{path!r}: want a path from the root, as the node sees it")
    return str(Path(path))


def _remove_empty(directory: Path, top: Path) -> None:
    while directory != top:
        try:
            directory.rmdir()
        except OSError:  # something else is in it
            return
        directory = directory.parent
