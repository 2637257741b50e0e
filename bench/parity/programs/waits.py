"""Waits and slow writes of users' programs, each by its name; all end by themselves."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import itertools
import mmap
import multiprocessing
import os
import select
import signal
import socket
import sqlite3
import subprocess
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import here  # type: ignore[import-not-found]

MB = 1 << 20
PROGRAMS = Path(__file__).resolve().parent


class Planned(NamedTuple):
    """A wait at a step, of all ranks or of one."""

    kind: str
    step: int
    seconds: float
    rank: str

    def make(self) -> None:
        """Wait, if this rank does."""
        if self.rank in ("", str(here.RANK)):
            KINDS[self.kind](self.seconds)


def parse(text: str) -> Planned:
    """Read KIND:STEP:SECONDS[:RANK]."""
    kind, step, seconds, *rank = text.split(":")
    return Planned(kind, int(step), float(seconds), rank[0] if rank else "")


def _own(name: str) -> Path:
    return Path(f"{name}.{here.RANK}.tmp")


# -- idle


def by_select(seconds: float) -> None:
    """Wait in select for a socket that stays silent."""
    one, other = socket.socketpair()
    select.select([one], [], [], seconds)
    one.close()
    other.close()


def recv(seconds: float) -> None:
    """Wait in recv for a child that answers late."""
    one, other = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        time.sleep(seconds)
        other.sendall(b"x")
        os._exit(0)
    one.recv(1)
    os.waitpid(pid, 0)


def trickle(seconds: float) -> None:
    """Receive a byte every five seconds."""
    one, other = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        for _ in range(int(seconds / 5)):
            time.sleep(5)
            other.sendall(b"x")
        os._exit(0)
    other.close()
    while one.recv(1):
        pass
    os.waitpid(pid, 0)


def lock(seconds: float) -> None:
    """Wait for a lock file that rank 0 holds."""
    with open("lock.tmp", "w", encoding="utf-8") as file:
        if here.RANK:
            time.sleep(1)
        fcntl.flock(file, fcntl.LOCK_EX)
        if here.RANK == 0:
            time.sleep(seconds)
        fcntl.flock(file, fcntl.LOCK_UN)


def poll(seconds: float) -> None:
    """Look for a file twice a second, as one rank does for another's download."""
    mark = _own("mark")
    writer = subprocess.Popen(["sh", "-c", f"sleep {seconds}; touch {mark}"])
    while not mark.exists():
        time.sleep(0.5)
    writer.wait()


def event(seconds: float) -> None:
    """Wait for a thread's event."""
    done = threading.Event()
    threading.Timer(seconds, done.set).start()
    done.wait()


def _put(queue: multiprocessing.Queue[int], seconds: float) -> None:
    time.sleep(seconds)
    queue.put(1)


def loader(seconds: float) -> None:
    """Wait for a batch of a loader's process."""
    queue: multiprocessing.Queue[int] = multiprocessing.Queue()
    worker = multiprocessing.Process(target=_put, args=(queue, seconds))
    worker.start()
    queue.get()
    worker.join()


def child(seconds: float) -> None:
    """Wait for a child that waits."""
    subprocess.run(["sleep", str(seconds)], check=True)


def by_asyncio(seconds: float) -> None:
    """Wait in an event loop."""
    asyncio.run(asyncio.sleep(seconds))


def pause(seconds: float) -> None:
    """Wait for a signal."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(int(seconds))
    signal.pause()


def gil(seconds: float) -> None:
    """Wait in a C call that keeps the interpreter's lock."""
    for _ in range(int(seconds)):
        ctypes.PyDLL(None).usleep(999_000)


def one_call(seconds: float) -> None:
    """Wait in one C call that keeps the interpreter's lock all the time."""
    ctypes.PyDLL(None).sleep(int(seconds))


def fifo(seconds: float) -> None:
    """Wait in open() for the writer of a named pipe."""
    path = _own("fifo")
    os.mkfifo(path)
    writer = subprocess.Popen(["sh", "-c", f"sleep {seconds}; echo x > {path}"])
    path.read_text()
    writer.wait()


def sqlite(seconds: float) -> None:
    """Wait for a database that rank 0 keeps locked."""
    base = sqlite3.connect("base.tmp", timeout=seconds + 60, isolation_level=None)
    if here.RANK:
        time.sleep(1)
    base.execute("BEGIN EXCLUSIVE")
    if here.RANK == 0:
        time.sleep(seconds)
    base.execute("COMMIT")
    base.close()


def _store(path: str, method: str) -> int:
    url = f"http://{os.environ['STORE']}{path}"
    try:
        request = urllib.request.Request(url, method=method, data=b"x" if method == "PUT" else None)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def get(seconds: float) -> None:
    """Read from an object store that answers late."""
    assert _store(f"/{seconds}", "GET") == 200


def put(seconds: float) -> None:
    """Write to an object store that says 503 for a while: try again, with back-off."""
    delay = 1.0
    while _store(f"/{seconds}", "PUT") != 200:
        time.sleep(delay)
        delay = min(2 * delay, 16)


def thread(seconds: float) -> None:
    """Wait for a thread that sleeps, in join."""
    other = threading.Thread(target=time.sleep, args=(seconds,))
    other.start()
    other.join()


def stdin(seconds: float) -> None:
    """Wait for a line of standard input, which rank 0 has."""
    del seconds
    if here.RANK == 0:
        input()


# -- writes


def spool(seconds: float) -> None:
    """Save 64 KiB every three seconds to a throttled store."""
    end = time.monotonic() + seconds
    with _own("big").open("wb") as file:
        while time.monotonic() < end:
            file.write(bytes(65536))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(3)
    _own("big").unlink()


def csave(seconds: float) -> None:
    """Save 5 MB/s in one C call, which lets other threads run."""
    library = ctypes.CDLL(str(PROGRAMS / "csave.so"))
    library.save(os.fsencode(_own("big")), int(seconds))


def csave_locked(seconds: float) -> None:
    """Save 5 MB/s in one C call, which keeps the interpreter's lock."""
    library = ctypes.PyDLL(str(PROGRAMS / "csave.so"))
    library.save(os.fsencode(_own("big")), int(seconds))


def fsync(seconds: float) -> None:
    """Write and fsync megabytes in a loop."""
    end = time.monotonic() + seconds
    with _own("big").open("wb") as file:
        while time.monotonic() < end:
            file.seek(0)
            file.write(bytes(MB))
            os.fsync(file.fileno())
            time.sleep(0.2)
    _own("big").unlink()


def crunch(seconds: float) -> None:
    """Compute in C calls of ten seconds that keep the interpreter's lock."""
    os.nice(19)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(itertools.repeat(0, 300_000_000))


def pack(seconds: float) -> None:
    """Have a child compress what another child makes."""
    make = f"for i in $(seq {int(seconds)}); do head -c 1000000 /dev/zero; sleep 1; done"
    subprocess.run(["sh", "-c", f"{{ {make}; }} | zstd -q > {_own('zst')}"], check=True)
    _own("zst").unlink()


def tar(seconds: float) -> None:
    """Have a child write a file slowly, and wait for it."""
    text = f"for i in $(seq {int(seconds)}); do head -c 100000 /dev/zero; sleep 1; done"
    subprocess.run(["sh", "-c", f"{{ {text}; }} > {_own('tar')}"], check=True)
    _own("tar").unlink()


def pages(seconds: float) -> None:
    """Write a mapped file page by page."""
    end = time.monotonic() + seconds
    with _own("map").open("w+b") as file:
        file.truncate(64 * MB)
        with mmap.mmap(file.fileno(), 0) as mapped:
            for page in itertools.count():
                mapped[page * 4096 % len(mapped)] = 1
                time.sleep(0.002)
                if time.monotonic() > end:
                    break
    _own("map").unlink()


def squeeze(seconds: float) -> None:
    """Compress in this process, with pauses."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        zlib.compress(bytes(MB))
        time.sleep(0.3)


def small_files(seconds: float) -> None:
    """Write many small files, as a sharded save does."""
    end = time.monotonic() + seconds
    for number in itertools.count():
        Path(f"shard.{here.RANK}.{number % 10}.tmp").write_bytes(bytes(1000))
        time.sleep(0.5)
        if time.monotonic() > end:
            break
    for path in Path().glob(f"shard.{here.RANK}.*"):
        path.unlink()


KINDS: dict[str, Callable[[float], None]] = {
    "sleep": time.sleep,
    "select": by_select,
    "asyncio": by_asyncio,
    **{
        each.__name__: each
        for each in (
            *(recv, trickle, lock, poll, event, loader, child, pause, gil, one_call, fifo),
            *(sqlite, get, put, thread, stdin, spool, csave, csave_locked, fsync, crunch, pack),
            *(tar, pages, squeeze, small_files),
        )
    },
}
