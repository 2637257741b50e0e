"""A small FUSE file system in memory that stops answering on command: a real stale mount.

One server process per mount (`serve`), started by the keeper outside the node. SIGUSR1 makes it
stale: like a server that hangs, it still takes requests but never answers one again. A process that
sends a request is then in D state, and SIGKILL does not end it while the server lives; when the
server dies, the kernel aborts the connection and all waiting processes get an error.

A FUSE request can be interrupted by a signal unless the server said that it knows no interrupts.
So the mounting process runs `probe` once: it sends a request, and the server sends it a signal and
answers the INTERRUPT request that follows with ENOSYS. From then on waits are uninterruptible.
"""

import errno
import os
import signal
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

_HEADER = struct.Struct("<IIQQIII4x")
_ANSWER = struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_BUFFER = 1 << 20
_PAGE = 4096
_ROOM = 1 << 30  # bytes that statfs claims
_MAX_WRITE = 128 << 10
_MODE, _UID, _GID, _SIZE = 1, 2, 4, 8  # what a SETATTR changes
_INIT, _FORGET, _INTERRUPT, _BATCH_FORGET, _GETATTR, _ROOT = 26, 2, 36, 42, 3, 1


def options(device: int) -> str:
    """Options of the mount whose other end is the open /dev/fuse `device`."""
    return (
        f"fd={device},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other,"
        f"max_read={_MAX_WRITE}"
    )


def probe(target: str) -> None:
    """Complete the mount at `target` (see above); for the process that mounted."""
    signal.signal(signal.SIGUSR1, lambda *_: None)
    os.stat(target)  # noqa: PTH116 - Path.stat() would do more


@dataclass
class _Inode:
    mode: int
    uid: int = 0
    gid: int = 0
    data: bytearray = field(default_factory=bytearray)
    names: dict[bytes, int] = field(default_factory=dict)
    time: float = field(default_factory=time.time)


class _Refused(Exception):
    def __init__(self, code: int) -> None:
        self.code = code


class _Server:
    def __init__(self, device: int) -> None:
        self.device = device
        self.stale = False
        self.probed = 0  # unique id of the request that `probe` waits for
        self.nodes = {_ROOT: _Inode(stat.S_IFDIR | 0o1777)}
        self.next = _ROOT + 1
        # By opcode of the FUSE protocol; flush, fsync and the rest are ENOSYS, which is a success
        # or a refusal as the kernel sees fit.
        self.calls: dict[int, Callable[[int, bytes, tuple[int, int]], bytes]] = {
            1: self.lookup, 4: self.setattr, 9: self.mkdir, 10: self.unlink, 11: self.unlink,
            12: self.rename, 14: self.open, 15: self.read, 16: self.write, 17: self.statfs,
            18: self.nothing, 27: self.open, 28: self.readdir, 29: self.nothing, 35: self.create,
            38: self.nothing, 45: self.rename,
        }  # fmt: skip

    def run(self) -> None:
        while True:
            try:
                request = os.read(self.device, _BUFFER)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EAGAIN):  # the asker gave up
                    continue
                return  # ENODEV: unmounted
            self.handle(request)

    def handle(self, request: bytes) -> None:
        _, code, unique, node, uid, gid, pid = _HEADER.unpack_from(request)
        body = request[_HEADER.size :]
        if self.stale or code in (_FORGET, _BATCH_FORGET):
            return
        if code == _INIT:
            self.answer(unique, self.init())
        elif code == _INTERRUPT:
            self.answer(unique, b"", errno.ENOSYS)
            self.answer(self.probed, self.attributes(_ROOT))
        elif code == _GETATTR and not self.probed:
            self.probed = unique
            os.kill(pid, signal.SIGUSR1)
        elif code == _GETATTR:
            self.attempt(unique, lambda: self.attributes(node))
        elif code in self.calls:
            self.attempt(unique, lambda: self.calls[code](node, body, (uid, gid)))
        else:
            self.answer(unique, b"", errno.ENOSYS)

    def attempt(self, unique: int, call: Callable[[], bytes]) -> None:
        try:
            self.answer(unique, call())
        except _Refused as error:
            self.answer(unique, b"", error.code)
        except KeyError:
            self.answer(unique, b"", errno.ESTALE)

    def answer(self, unique: int, data: bytes, error: int = 0) -> None:
        try:
            os.write(self.device, _ANSWER.pack(_ANSWER.size + len(data), -error, unique) + data)
        except OSError:  # the asker was killed meanwhile
            pass

    # -- what the file system does ----------------------------------------------------------

    def init(self) -> bytes:
        flags = 1 << 5  # writes of more than a page
        return struct.pack("<4I2HI", 7, 31, 0, flags, 0, 0, _MAX_WRITE) + bytes(40)

    def attr(self, node: int) -> bytes:
        one = self.nodes[node]
        size, now, parts = len(one.data), int(one.time), int(one.time % 1 * 1e9)
        links = 2 if stat.S_ISDIR(one.mode) else 1
        return _ATTR.pack(
            node, size, -(-size // 512), now, now, now, parts, parts, parts,
            one.mode, links, one.uid, one.gid, 0, _PAGE, 0,
        )  # fmt: skip

    def attributes(self, node: int) -> bytes:
        return bytes(16) + self.attr(node)  # valid for no time: every stat asks here

    def entry(self, node: int) -> bytes:
        return struct.pack("<4Q2I", node, 0, 0, 0, 0, 0) + self.attr(node)

    def lookup(self, node: int, body: bytes, _who: tuple[int, int]) -> bytes:
        found = self.nodes[node].names.get(_name(body))
        if found is None:
            raise _Refused(errno.ENOENT)
        return self.entry(found)

    def setattr(self, node: int, body: bytes, _who: tuple[int, int]) -> bytes:
        values = struct.unpack_from("<2I6Q8I", body)
        valid, size, mode, uid, gid = values[0], values[3], values[11], values[13], values[14]
        one = self.nodes[node]
        if valid & _MODE:
            one.mode = stat.S_IFMT(one.mode) | stat.S_IMODE(mode)
        one.uid = uid if valid & _UID else one.uid
        one.gid = gid if valid & _GID else one.gid
        if valid & _SIZE:
            one.data[size:] = bytes(max(0, size - len(one.data)))
        one.time = time.time()
        return self.attributes(node)

    def add(self, parent: int, name: bytes, mode: int, who: tuple[int, int]) -> int:
        names = self.nodes[parent].names
        if name in names:
            raise _Refused(errno.EEXIST)
        node, self.next = self.next, self.next + 1
        self.nodes[node] = _Inode(mode, *who)
        names[name] = node
        return node

    def mkdir(self, node: int, body: bytes, who: tuple[int, int]) -> bytes:
        mode = struct.unpack_from("<I", body)[0]
        return self.entry(self.add(node, _name(body[8:]), stat.S_IFDIR | mode, who))

    def create(self, node: int, body: bytes, who: tuple[int, int]) -> bytes:
        mode = struct.unpack_from("<2I", body)[1]
        made = self.add(node, _name(body[16:]), stat.S_IFREG | stat.S_IMODE(mode), who)
        return self.entry(made) + bytes(16)

    def unlink(self, node: int, body: bytes, _who: tuple[int, int]) -> bytes:
        names, name = self.nodes[node].names, _name(body)
        if name not in names:
            raise _Refused(errno.ENOENT)
        if self.nodes[names[name]].names:
            raise _Refused(errno.ENOTEMPTY)
        del names[name]  # processes that have it open keep the inode
        return b""

    def rename(self, node: int, body: bytes, _who: tuple[int, int]) -> bytes:
        parent = struct.unpack_from("<Q", body)[0]
        old, new = body.rstrip(b"\0").split(b"\0")[-2:]
        self.nodes[parent].names[new] = self.nodes[node].names.pop(old)
        return b""

    def open(self, node: int, _body: bytes, _who: tuple[int, int]) -> bytes:
        return bytes(16) if node in self.nodes else b""

    def read(self, node: int, body: bytes, _who: tuple[int, int]) -> bytes:
        offset, size = struct.unpack_from("<8xQI", body)
        return bytes(self.nodes[node].data[offset : offset + size])

    def write(self, node: int, body: bytes, _who: tuple[int, int]) -> bytes:
        offset, size = struct.unpack_from("<8xQI", body)
        one = self.nodes[node]
        if len(one.data) < offset:
            one.data.extend(bytes(offset - len(one.data)))
        one.data[offset : offset + size] = body[40 : 40 + size]
        one.time = time.time()
        return struct.pack("<II", size, 0)

    def readdir(self, node: int, body: bytes, _who: tuple[int, int]) -> bytes:
        offset, size = struct.unpack_from("<8xQI", body)
        rows = [(b".", node), (b"..", _ROOT), *self.nodes[node].names.items()]
        out = b""
        for number, (name, found) in enumerate(rows[offset:], offset + 1):
            kind = stat.S_IFMT(self.nodes[found].mode) >> 12
            row = struct.pack("<2Q2I", found, number, len(name), kind) + name
            row += bytes(-len(row) % 8)
            if len(out) + len(row) > size:
                break
            out += row
        return out

    def statfs(self, _node: int, _body: bytes, _who: tuple[int, int]) -> bytes:
        used = sum(len(one.data) for one in self.nodes.values())
        total, free = _ROOM // _PAGE, (_ROOM - used) // _PAGE
        return struct.pack("<5Q4I24x", total, free, free, 1 << 20, 1 << 19, _PAGE, 255, _PAGE, 0)

    def nothing(self, _node: int, _body: bytes, _who: tuple[int, int]) -> bytes:
        return b""


def _name(body: bytes) -> bytes:
    return body.split(b"\0", 1)[0]


def serve(device: int) -> NoReturn:
    """Be the server of the mount at the other end of `device` until it is unmounted."""
    server = _Server(device)

    def go_stale(*_: object) -> None:
        server.stale = True

    signal.signal(signal.SIGUSR1, go_stale)
    server.run()
    os._exit(0)
