"""The first process of a node that has a kernel of its own: mounts, daemons, commands, orphans.

The node's root is the host's file system, read-only, as the node's first process on the host sees
it (lab/keeper/mounts.py).
"""

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from lab import linux
from lab.daemon import start_daemon
from lab.kernel import agent
from lab.spec import NETMASK, OWN_DIRS, ROOT, LabSpec, address, root_env

_QUIET = linux.MS_NOSUID | linux.MS_NODEV
_CGROUPS = Path("/sys/fs/cgroup")
_CONTROLLERS = "+cpu +io +memory +pids"
_START_S = 30.0


def main(name: str, node: str) -> None:
    """Boot; serve until the kernel ends."""
    linux.mount("proc", "/proc", "proc", _QUIET)
    linux.mount("sysfs", "/sys", "sysfs", _QUIET)
    spec = msgspec.json.decode((ROOT / name / "lab.json").read_bytes(), type=LabSpec)
    linux.sethostname(node)
    _mount_all(spec)
    _make_cgroups()
    subprocess.run(["ip", "link", "set", "vec0", "name", "eth0"], check=True, env=root_env(spec))
    linux.set_link("lo", True)
    linux.set_address("eth0", address(node), NETMASK)
    linux.set_link("eth0", True)
    os.chdir("/")
    _start_munged(spec, node)
    start_daemon(spec, f"slurmd-{node}.out", ["slurmd", "-D", "-N", node])
    agent.serve(address(node))


def _mount_all(spec: LabSpec) -> None:
    Path("/dev/pts").mkdir(exist_ok=True)
    linux.mount("devpts", "/dev/pts", "devpts", linux.MS_NOSUID, "mode=620,ptmxmode=666")
    Path("/dev/shm").mkdir(exist_ok=True)
    for path, mode in OWN_DIRS.items():
        linux.mount("tmpfs", path, "tmpfs", _QUIET, f"mode={mode:o}")
    for path in ("/var/spool", "/var/log", str(spec.node_dir), str(spec.munge_socket.parent)):
        linux.mount("tmpfs", path, "tmpfs", _QUIET, "mode=755")
    spec.spool.mkdir(mode=0o755)
    spec.disk_dir.mkdir(mode=0o755)
    shown = [path for path in spec.visible if path.startswith(tuple(f"{d}/" for d in OWN_DIRS))]
    for path in [*shown, str(spec.dir / "log"), str(spec.shared)]:
        Path(path).mkdir(parents=True, exist_ok=True)
        linux.mount("none", path, "hostfs", 0, path)


def _make_cgroups() -> None:
    """Give Slurm all controllers of the kernel, in the slice where it has its scope."""
    linux.mount("cgroup2", str(_CGROUPS), "cgroup2", _QUIET)
    for place in (_CGROUPS, _CGROUPS / "system.slice"):
        place.mkdir(exist_ok=True)
        (place / "cgroup.subtree_control").write_text(_CONTROLLERS)


def _start_munged(spec: LabSpec, node: str) -> None:
    """A unix socket does not reach from one kernel to another."""
    words = [f"--socket={spec.munge_socket}", f"--key-file={spec.dir}/etc/munge.key"]
    words += [f"--seed-file={spec.node_dir}/munge.seed", f"--pid-file={spec.node_dir}/munged.pid"]
    log = f"--log-file={spec.node_dir}/munged.log"
    start_daemon(spec, f"munged-{node}", ["munged", "--foreground", "--num-threads=2", log, *words])
    _wait("munged", spec.munge_socket.exists)


def _wait(name: str, answers: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_S
    while not answers():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} did not answer in {_START_S:.0f} s")
        time.sleep(0.02)


def _say(text: str) -> None:
    with open("/dev/console", "w") as console:
        console.write(text)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:3])  # the kernel puts words of its own behind them
    except BaseException:  # noqa: BLE001 - the death of init would only say "panic"
        _say(traceback.format_exc())
        linux.power_off()
