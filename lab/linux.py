"""The few system calls the lab needs and Python 3.11 does not have; all raise OSError."""

import ctypes
import fcntl
import os
import signal
import socket
import struct
import time
from pathlib import Path

CLONE_NEWTIME = 0x00000080
CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 0x2

_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_SIOCSIFADDR, _SIOCSIFNETMASK = 0x8916, 0x891C
_IFF_UP = 0x1

_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"{what}: {os.strerror(errno)}")


def unshare(flags: int) -> None:
    """Move this process (NEWPID: its future children) to new namespaces."""
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that made it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def has_own_uptime() -> bool:
    """Return whether the kernel can give a node an uptime of its own (time namespaces)."""
    return Path("/proc/self/ns/time_for_children").exists()


def set_uptime(age: float) -> None:
    """Give this process's future children a clock of their own: booted ``age`` seconds ago.

    Only CLOCK_BOOTTIME (uptime) changes, no other clock. Does nothing if the kernel cannot do it.
    """
    if not has_own_uptime():
        return
    unshare(CLONE_NEWTIME)
    seconds, nanoseconds = divmod(
        int(age * 1e9) - time.clock_gettime_ns(time.CLOCK_BOOTTIME), 10**9
    )
    Path("/proc/self/timens_offsets").write_text(f"boottime {seconds} {nanoseconds}\n")


def mount(source: str, target: str, fstype: str, flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    result = _libc.mount(
        source.encode(), target.encode(), fstype.encode(), ctypes.c_ulong(flags), options.encode()
    )
    _check(result, f"mount {fstype or 'bind'} {source} on {target}")


def bind(source: str, target: str) -> None:
    """Show `source` (a file, or a directory with what is mounted below it) at `target`."""
    mount(source, target, "", MS_BIND | MS_REC)


def remount_tmpfs(target: str, options: str) -> None:
    """Change options of the tmpfs mounted at `target`, its size for one."""
    mount("tmpfs", target, "tmpfs", MS_REMOUNT | MS_NOSUID | MS_NODEV, options)


def unmount(target: str) -> None:
    """Detach the last mount at `target`; processes that still use it keep it."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def enter_namespace(path: str) -> None:
    """Move this process (it must have one thread) to a namespace, say "/proc/7/ns/mnt"."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(fd, 0), f"setns {path}")
    finally:
        os.close(fd)


def power_off() -> None:
    """End the kernel that this process is the first of."""
    _check(_libc.reboot(0x4321FEDC), "reboot")


def sethostname(name: str) -> None:
    raw = name.encode()
    _check(_libc.sethostname(raw, ctypes.c_size_t(len(raw))), f"sethostname {name}")


def _sockaddr(address: str) -> bytes:
    return struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))


def set_link(interface: str, up: bool) -> None:
    """Take an interface of this network namespace up or down (some microseconds)."""
    name = interface.encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        reply = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16s24x", name))
        flags = struct.unpack_from("=H", reply, 16)[0]
        flags = flags | _IFF_UP if up else flags & ~_IFF_UP
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("=16sH22x", name, flags))


def set_address(interface: str, address: str, netmask: str) -> None:
    """Give an interface of this network namespace its IPv4 address."""
    name = interface.encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFADDR, struct.pack("=16s16s8x", name, _sockaddr(address)))
        fcntl.ioctl(sock, _SIOCSIFNETMASK, struct.pack("=16s16s8x", name, _sockaddr(netmask)))
