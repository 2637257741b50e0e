"""The hardware faults that a lab can make in a node, as methods of `Lab`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.spec import LabSpec


class Breakage(ABC):
    """Faults of hardware, kernel log, disks and mounts. All return the wall-clock time before.

    `heal` undoes all of them, but for what the kernel's log says; a boot undoes that too.
    """

    spec: LabSpec

    @abstractmethod
    def ask(self, op: str, **more: Any) -> dict[str, Any]:
        """The keeper's answer to one request."""

    @property
    def scratch(self) -> Path:
        """The mount point of the file system that `Cluster(scratch=True)` gives every node."""
        return self.spec.scratch_dir

    @property
    def disk(self) -> Path:
        """A directory of each node's own that outlives its crashes: its local disk."""
        return self.spec.disk_dir

    def gpu(
        self,
        node: str,
        index: int | None = None,
        *,
        xid: int | None = None,
        text: str = "",
        ecc: int | None = None,
        lost: bool | str = False,
        remap_failed: bool = False,
        remap_pending: bool = False,
        pcie_width: int | None = None,
        recovery_action: int | None = None,
        temp: int | None = None,
        throttle: str | None = None,
        nvml_hang: str | None = None,
        driver: str | None = None,
        set: Mapping[str, object] | None = None,
        reset: bool = False,
        heal: bool = False,
    ) -> float:
        """Break or mend GPU `index` (NVML's), or what belongs to the node (None).

        `xid`: the kernel logs it, with `text`. `ecc`: uncorrectable errors. `lost`: "handle" (also
        True): NVML counts the GPU and gives no handle; "calls": every call says that it is lost;
        "absent": it is neither counted nor on the PCI bus. `throttle`: names of gpu_faults.THROTTLE
        with commas. `nvml_hang`: "sleep" or "dstate"; without `index` at nvmlInit. `driver`: its
        version, of the node. `set`: keys of nvml.state, of the GPU or the node (docs/lab.md).
        `reset`: what nvidia-smi --gpu-reset cures. `heal`: all.
        """
        given: list[tuple[str, object]] = [
            ("xid", None if xid is None else f"{xid} {text}".rstrip()),
            ("ecc", ecc),
            ("lost", "handle" if lost is True else lost or None),
            ("remap_failed", "1" if remap_failed else None),
            ("remap_pending", "1" if remap_pending else None),
            ("pcie_width", pcie_width),
            ("recovery_action", recovery_action),
            ("temp", temp),
            ("throttle", throttle),
            ("nvml_hang", nvml_hang),
            ("driver", driver),
            *(("set", f"{key}={value}") for key, value in (set or {}).items()),
            ("reset", "1" if reset else None),
            ("heal", "1" if heal else None),
        ]
        changes = [(what, str(value)) for what, value in given if value is not None]
        return float(self.ask("gpu", node=node, index=index, changes=changes)["time"])

    def link(self, node: str, up: bool, port: str = "mlx5_0") -> float:
        """Take an InfiniBand port up or down; the kernel logs it."""
        return float(self.ask("link", node=node, port=port, up=up)["time"])

    def kmsg(self, node: str, text: str, level: int = 4) -> float:
        """Log a line as the node's kernel; `level`: its severity, 0 emergency to 7 debug."""
        return float(self.ask("kmsg", node=node, text=text, level=level)["time"])

    def fill(self, node: str, path: str | Path = "/tmp", leave: int | str = 0) -> float:
        """Fill the file system of `path` but for `leave` (bytes, or "5%").

        Only the node's own: /tmp, /dev/shm, slurmd's spool.
        """
        return float(self.ask("fill", node=node, path=str(path), leave=str(leave))["time"])

    def stale_mount(
        self, node: str, path: str | Path | None = None, *, heal: bool = False
    ) -> float:
        """Make the mount at `path` (default `scratch`) stop answering: callers hang in D state.

        If the lab has no mount there, it makes one. `heal`: end it; waiting processes get an error,
        and the mount is gone (`scratch`: mounted anew).
        """
        op, where = "heal_mount" if heal else "stale_mount", str(path or self.scratch)
        return float(self.ask(op, node=node, path=where)["time"])
