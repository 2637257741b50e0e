"""Bring a lab up and take it down again, from the host (root)."""

import fcntl
import os
import selectors
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from lab import spec as texts
from lab.errors import LabError
from lab.kernel import uml
from lab.machine import fake_nvml
from lab.slurm import accounting, releases
from lab.spec import ROOT, UID, LabSpec

REPOSITORY = Path(__file__).resolve().parents[1]
_PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "mungekey", "ip")
_UP_S = 300.0  # longer than any wait of a node's first process, and enough for 1,200 nodes
_DOWN_S = 120.0


def check_host() -> None:
    """Raise LabError unless this machine can hold a lab."""
    if sys.platform != "linux":
        raise LabError("a lab needs Linux (namespaces)")
    if os.geteuid() != 0:
        raise LabError("a lab needs root (namespaces, device files); try: sudo python -m lab …")
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [name for name in _PROGRAMS if not shutil.which(name, path=path)]
    if missing:
        raise LabError(
            f"not installed: {', '.join(missing)}; try: "
            "apt-get install slurm-wlm slurm-wlm-basic-plugins munge iproute2"
        )


def default_visible() -> tuple[str, ...]:
    """Return the paths the lab's user must reach: clone, virtual environment, interpreter."""
    paths = [REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve()]
    return tuple(dict.fromkeys(str(p.resolve()) for p in paths if p.exists()))


def bring_up(spec: LabSpec, owner: int = 0) -> LabSpec:
    """Start a lab; return when all its daemons are started (Slurm may still be registering).

    The description that is returned names the release of Slurm that was asked for.

    The lab ends with the process `owner` (0: only by `take_down`). Raises LabError if it fails.
    """
    check_host()
    texts.check_spec(spec)
    release = releases.find(spec.slurm)
    spec = msgspec.structs.replace(
        spec, slurm=release.name, slurm_root=str(release.root) if release.root else ""
    )
    if spec.kernel:
        uml.check(spec)
    if spec.gpus:
        fake_nvml.check_compiler()
    if spec.accounting:
        accounting.check_programs()
    lock = _claim(spec)
    try:
        _write_files(spec)
        ready = _start_reaper(spec, lock, owner)
    except BaseException:
        remove(spec.dir)
        raise
    finally:
        os.close(lock)
    try:
        answer = _read_answer(ready)
        if answer != "ok":
            raise LabError(f"lab {spec.name} did not come up: {answer or 'keeper ended, no word'}")
    except BaseException:
        take_down(spec.name)
        raise
    return spec


def _start_reaper(spec: LabSpec, lock: int, owner: int) -> int:
    """Start the lab's process on the host; return the pipe it answers on."""
    ready_r, ready_w = os.pipe()
    words = [spec.name, str(lock), str(ready_w), str(owner)]
    argv = [sys.executable, "-m", "lab.keeper.reaper", *words]
    with spec.log("keeper").open("ab") as log:
        subprocess.Popen(
            argv,
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(lock, ready_w),
        )
    os.close(ready_w)
    return ready_r


def _claim(spec: LabSpec) -> int:
    """Make the lab's directory ours; return its locked descriptor.

    The reaper and the keeper hold the lock for as long as the lab lives.
    """
    while True:
        ROOT.mkdir(mode=0o755, parents=True, exist_ok=True)
        try:
            spec.dir.mkdir(mode=0o755, exist_ok=True)
        except FileNotFoundError:  # the last of the other labs ended just now
            continue
        lock = _lock(spec.dir)
        if lock is None:
            raise LabError(f"lab {spec.name} is up already; `down --name {spec.name}` ends it")
        if lock >= 0:
            break
    for entry in spec.dir.iterdir():  # of a lab whose reaper and keeper were killed together
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    return lock


def _lock(directory: Path) -> int | None:
    """Lock a lab's directory: its descriptor, None if the lab lives, -1 if it vanished."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), directory.stat()):
            return fd
    except BlockingIOError:
        os.close(fd)
        return None
    except FileNotFoundError:
        pass
    os.close(fd)
    return -1


def _write_files(spec: LabSpec) -> None:
    for name in ("etc", "log", "munge", "spool", "node", "dev", "shared", "disks"):
        (spec.dir / name).mkdir(mode=0o755)
    for node in spec.compute_names:
        spec.disk_of(node).mkdir(mode=0o755)
    spec.dir.chmod(0o755)
    os.chown(spec.shared, UID, UID)
    (spec.dir / "lab.json").write_bytes(msgspec.json.encode(spec))
    etc = spec.dir / "etc"
    files = {
        "slurm.conf": texts.slurm_conf(spec),
        "gres.conf": texts.gres_conf(spec),
        "cgroup.conf": texts.cgroup_conf(spec),
        "hosts": texts.hosts_file(spec),
        "passwd": texts.passwd_file(Path("/etc/passwd").read_text(), spec.shared),
        "group": texts.group_file(Path("/etc/group").read_text()),
    }
    if spec.switches:
        files["topology.conf"] = texts.topology_conf(spec)
    if spec.scratch:
        files["fstab"] = texts.fstab_file(_text_of("/etc/fstab"), spec)
    for name, text in files.items():
        (etc / name).write_text(text)
        (etc / name).chmod(0o644)
    secret = {"munge.key": os.urandom(1024)}
    if spec.accounting:
        secret["slurmdbd.conf"] = accounting.slurmdbd_conf(spec).encode()
    for name, content in secret.items():
        fd = os.open(etc / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(fd, content)
        os.close(fd)
    for index in range(spec.gpus):  # /dev/null under the name of a GPU
        path = spec.dir / "dev" / f"nvidia{index}"
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        path.chmod(0o666)
    if spec.gpus:  # below the mount point of the nodes' tmpfs: its path is the one they will see
        (spec.node_dir / "gpu").mkdir(mode=0o755)


def _text_of(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


def _read_answer(fd: int) -> str:
    with selectors.DefaultSelector() as selector, open(fd, "rb", buffering=0) as pipe:
        selector.register(pipe, selectors.EVENT_READ)
        if not selector.select(_UP_S):
            return f"no word from its keeper in {_UP_S:.0f} s"
        return pipe.read(4096).decode(errors="replace")


def remove(directory: Path) -> None:
    """Remove a lab's directory, and the directory of all labs if it was the last."""
    shutil.rmtree(directory, ignore_errors=True)
    try:
        directory.parent.rmdir()
    except OSError:  # other labs
        pass


def take_down(name: str) -> bool:
    """End a lab and wait until nothing is left of it; False if there was none."""
    texts.check_name(name)
    directory = ROOT / name
    deadline = time.monotonic() + _DOWN_S
    asked = 0
    found = False
    while directory.is_dir():
        found = True
        lock = _lock(directory)
        if lock is not None and lock >= 0:  # nobody holds it: only files were left
            remove(directory)
            os.close(lock)
        elif lock is None and not asked and (asked := reaper_pid(directory)):
            _terminate(asked)
        if time.monotonic() > deadline:
            raise LabError(f"lab {name} did not end in {_DOWN_S:.0f} s; see {directory}/log")
        time.sleep(0.01)
    return found


def _terminate(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:  # ending by itself
        pass


def reaper_pid(spec_dir: Path) -> int:
    """Return the pid of a lab's reaper, which called listen() on the control socket; 0: none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        try:
            link.connect(str(spec_dir / "control.sock"))
        except OSError:  # coming up, or going down
            return 0
        raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("=iII", raw)[0])


def lab_names() -> list[str]:
    """The labs that are up."""
    if not ROOT.is_dir():
        return []
    return sorted(p.name for p in ROOT.iterdir() if (p / "control.sock").exists())
