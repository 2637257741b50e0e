"""Signs of work below a slot that a look at stacks does not show: counters, sockets, a tracer.

The counters only grow; robust-srun compares those of two inspections (``job.pace``).
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import sys
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path

from robust_slurm import process_stat
from robust_slurm.text import one_line
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.protocol.looking_messages import WorkCounters

_TICK = os.sysconf("SC_CLK_TCK")
_MINOR, _MAJOR = 7, 9  # page faults, in ``ProcessStat.fields``
GPUS = ("/dev/nvidia", "/dev/kfd")
_SOCKET = re.compile(r"socket:\[(\d+)\]")
PASSING = "py-spy"  # a profiler that stops a process for moments, no debugger

# linux/inet_diag.h, linux/sock_diag.h; bytes_acked and bytes_received of tcp_info in linux/tcp.h.
_NETLINK_SOCK_DIAG, _BY_FAMILY, _DONE, _ERROR = 4, 20, 3, 2
_REQUEST_DUMP = 0x1 | 0x300
_INFO = 2
_HEADER, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=HH")
_MESSAGE, _INODE = 72, 68  # sizes of inet_diag_msg, and of what comes before its inode
_BYTES = struct.Struct("=QQ")
_ACKED = 120  # offset in tcp_info
_ALL_STATES = 0xFFF
_ANSWERS = 256  # parts of an answer that are read: hosts may have many connections


def used(pids: Sequence[int], ranks: Collection[int]) -> WorkCounters:
    """Return what these processes have used so far; ended ones count as nothing.

    ``ranks``: those of them that may wait for a GPU. One that has one open spins while it waits, so
    its CPU time does not count.
    """
    ticks = io = faults = 0
    found = []
    inodes: set[int] = set()
    for pid in pids:
        try:
            process = process_stat.read(pid)
            faults += int(process.fields[_MINOR]) + int(process.fields[_MAJOR])
        except (OSError, ValueError):
            continue
        found.append(pid)
        io += _io(pid)
        files = _open_files(pid)
        inodes.update(int(match[1]) for match in map(_SOCKET.fullmatch, files) if match)
        spins = pid in ranks and any(file.startswith(GPUS) for file in files)
        ticks += 0 if spins else process.ticks
    number = zlib.crc32(" ".join(map(str, sorted(found))).encode())
    return WorkCounters(ticks / _TICK, io, socket_bytes(inodes), faults, number)


def tracer(pids: Sequence[int], proc: str = "/proc") -> str:
    """Return "gdb (pid 123)", which traces one of these processes; "" if none is traced."""
    for pid in pids:
        try:
            found = process_tree.tracer_of(pid, proc)
            if not found and process_stat.read(pid, proc).state == "t":
                return "a debugger"  # of another pid namespace
            name = process_stat.read(found, proc).name if found else PASSING
        except (OSError, ValueError):
            continue  # gone meanwhile
        if name != PASSING:
            return f"{one_line(name, 16)} (pid {found})"
    return ""


def _io(pid: int) -> int:
    """Return the bytes that a process has read and written through system calls."""
    try:
        text = Path(f"/proc/{pid}/io").read_text()
    except OSError:
        return 0
    words = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(words.get("rchar", 0)) + int(words.get("wchar", 0))


def _open_files(pid: int) -> list[str]:
    """Return what the descriptors of a process are open on."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(entry.path))  # noqa: PTH115
    return found


def socket_bytes(inodes: Collection[int]) -> int:
    """Return the bytes that those of these sockets that are TCP connections have carried.

    send() and recv() do not count in /proc/PID/io. -1 where the kernel does not tell.
    """
    if not inodes:
        return 0
    try:
        return sum(_carried(family, inodes) for family in (socket.AF_INET, socket.AF_INET6))
    except (OSError, struct.error, ValueError):
        return -1


def _carried(family: int, inodes: Collection[int]) -> int:
    body = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ALL_STATES)
    body += bytes(48)  # no addresses: all connections
    size = _HEADER.size + len(body)
    total = 0
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as line:
        line.settimeout(1.0)
        line.send(_HEADER.pack(size, _BY_FAMILY, _REQUEST_DUMP, 1, 0) + body)
        for _ in range(_ANSWERS):
            data = line.recv(1 << 16)
            while len(data) >= _HEADER.size:
                length, kind, _, _, _ = _HEADER.unpack_from(data)
                if kind in (_DONE, _ERROR) or length < _HEADER.size:
                    return total
                message = data[_HEADER.size : length]
                if int.from_bytes(message[_INODE:_MESSAGE], sys.byteorder) in inodes:
                    total += _bytes_of(message[_MESSAGE:])
                data = data[(length + 3) & ~3 :]
    return total


def _bytes_of(attributes: bytes) -> int:
    while len(attributes) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(attributes)
        if kind == _INFO and length >= _ATTRIBUTE.size + _ACKED + _BYTES.size:
            return sum(_BYTES.unpack_from(attributes, _ATTRIBUTE.size + _ACKED))
        attributes = attributes[max(_ATTRIBUTE.size, (length + 3) & ~3) :]
    return 0
