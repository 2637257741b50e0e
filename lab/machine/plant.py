"""Give a node its hardware when it boots: its own /sys, kernel log, boot id and, with GPUs, NVML.

All of it lies in the node's own tmpfs (`spec.node_dir`), where the keeper changes it later
(lab/machine/gear.py), and is bound over the real places in the node's mount namespace only.
"""

import os
import uuid
from collections.abc import Iterable
from pathlib import Path

from lab import linux
from lab.machine import kernlog
from lab.machine.fake_nvml import LIBRARY
from lab.machine.hardware import Hardware, Link, Tree, nvml_state, proc_tree, sys_tree
from lab.spec import LabSpec

_STEP_US = 100  # between lines of the boot log: all are over before the node's first process runs
_NVIDIA, _GPU_CLASS = "0x10de", "0x03"


def fresh_sys() -> None:
    """Mount /sys anew, so that it shows the network interfaces of this namespace."""
    quiet = linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("sysfs", "/sys", "sysfs", quiet | linux.MS_NOEXEC)
    if Path("/sys/fs/cgroup").is_dir():  # slurmd starts without, and cannot touch the host's
        linux.mount("tmpfs", "/sys/fs/cgroup", "tmpfs", linux.MS_RDONLY, "mode=755")


def plant(spec: LabSpec, node: str, library: bytes) -> None:
    """Make the node's hardware (its tmpfs is mounted already); `library`: the fake NVML, or b""."""
    own = spec.node_dir
    log = kernlog.records(kernlog.boot_log(spec.gpus), 0, 0, _STEP_US)
    _write(own / "kmsg", log)
    if Path("/dev/kmsg").exists():
        linux.bind(str(own / "kmsg"), "/dev/kmsg")
    _write(own / "boot_id", f"{uuid.uuid4()}\n")
    linux.bind(str(own / "boot_id"), "/proc/sys/kernel/random/boot_id")
    if not spec.gpus:
        return
    hardware = Hardware(node, spec.gpus)
    gpu = own / "gpu"
    gpu.mkdir(mode=0o755)
    (gpu / LIBRARY).write_bytes(library)
    (gpu / LIBRARY).chmod(0o755)
    _write(gpu / "nvml.state", nvml_state(hardware))
    linux.bind(str(spec.loader_cache), "/etc/ld.so.cache")
    write_tree(own / "sys", sys_tree(hardware))
    write_tree(own / "proc", proc_tree(hardware))
    _graft(own / "sys" / "devices", Path("/sys/devices"))
    _graft_pci(own / "sys" / "bus" / "pci" / "devices")
    _graft(own / "sys" / "class", Path("/sys/class"))
    _graft_modules(own / "sys" / "module")
    _graft(own / "proc", Path("/proc/driver"))


def write_tree(top: Path, tree: Tree) -> None:
    """Write files and links below `top`; directories are made."""
    made: set[Path] = set()
    for path, value in tree.items():
        target = top / path
        if target.parent not in made:
            target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            made.add(target.parent)
        write_entry(target, value)


def write_entry(target: Path, value: str | Link) -> None:
    """Write a file in place (who has it open sees the new text), or make a link."""
    if isinstance(value, Link):
        target.unlink(missing_ok=True)
        target.symlink_to(value.target)
    else:
        _write(target, value)


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    os.write(fd, text.encode())
    os.close(fd)


def _graft(ours: Path, place: Path) -> None:
    """Show the directory `ours` at `place`, with the real entries of `place` in it."""
    entries = [entry for entry in _real(place) if not (ours / entry).exists()]
    held = []
    for name in entries:
        if (place / name).is_symlink():
            (ours / name).symlink_to((place / name).readlink())
            continue
        held.append((name, os.open(place / name, os.O_PATH | os.O_CLOEXEC)))
        if (place / name).is_dir():
            (ours / name).mkdir()
        else:
            (ours / name).touch()
    linux.bind(str(ours), str(place))
    for name, fd in held:
        linux.bind(f"/proc/self/fd/{fd}", str(place / name))
        os.close(fd)


def _graft_pci(ours: Path) -> None:
    """The real PCI devices beside ours, without the GPUs that the host may have."""
    place = Path("/sys/bus/pci/devices")
    for name in _real(place):
        vendor, cls = _text(place / name / "vendor"), _text(place / name / "class")
        real_gpu = vendor == _NVIDIA and cls.startswith(_GPU_CLASS)
        if not real_gpu and not (ours / name).is_symlink():
            (ours / name).symlink_to((place / name).readlink())
    if place.is_dir():
        linux.bind(str(ours), str(place))
    else:  # a host without a PCI bus
        _graft(ours.parents[1], Path("/sys/bus"))


def _graft_modules(ours: Path) -> None:
    """Do the work of `_graft` with links in place of some hundred mounts."""
    place = Path("/sys/module")
    for name in _real(place):
        if not (ours / name).exists():
            (ours / name).symlink_to(f".host/{name}")
    (ours / ".host").mkdir()
    fd = os.open(place, os.O_PATH | os.O_CLOEXEC)
    linux.bind(str(ours), str(place))
    linux.bind(f"/proc/self/fd/{fd}", str(place / ".host"))
    os.close(fd)


def _real(place: Path) -> Iterable[str]:
    return sorted(os.listdir(place)) if place.is_dir() else []  # noqa: PTH208 - names are wanted


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def copy_library(spec: LabSpec) -> bytes:
    """The library as it was built, read before the node's tmpfs hides it."""
    path = spec.node_dir / "gpu" / LIBRARY
    return path.read_bytes() if spec.gpus else b""
