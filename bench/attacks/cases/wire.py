"""Attacks on the sockets that robust-srun, robust-task and their like listen on.

Each listener runs as the victim, with the usual limit of 1024 files; the attacker has no key.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import resource
import selectors
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from bench.attacks.attack import Attack, Got
from bench.attacks.room import MALLORY, VICTIM, Room, become
from bench.common import BenchError
from robust_slurm.checkpoint.store.store import Store
from robust_slurm.data.exchange.server import LaneServer
from robust_slurm.frames.wire import MAGIC, VERSION, Codec, WireError
from srun_wrapper.agent.connections.probe import Probe
from srun_wrapper.agent.loop import Loop
from srun_wrapper.protocol.messages import Hello, PeerAsk, PeerSay, encode
from srun_wrapper.protocol.server import listen

KEY = bytes(range(32))
FILES = 1024
"""The soft limit of a listener, as login sessions and slurmd have it."""
CROWD = 3000
WITHIN = 1.0
"""s in which a peer with the key has to be heard."""
TRIES = 5
RATE = 200
"""Connections a second that are opened again, once all have been open."""

Ready = Callable[[int], None]


class _Shelf:
    """Lanes that nobody asks for."""

    def __getattr__(self, _name: str) -> Callable[..., Future[Any]]:
        return lambda *_args: Future()


def _store(ready: Ready) -> None:
    """Run the store of robust-task."""
    made = Store(Path(tempfile.mkdtemp()), name="s", key=KEY, emit=lambda _event: None)
    ready(made.port)
    threading.Event().wait()


def _lanes(ready: Ready) -> None:
    """Run the data process of a node."""
    listener = socket.create_server(("", 0), backlog=1024)
    shelf: Any = _Shelf()
    server = LaneServer(listener, KEY, "plan", [("web", 0)], shelf)
    ready(listener.getsockname()[1])
    threading.Event().wait()
    server.close()


def _srun(ready: Ready) -> None:
    """Run robust-srun's server."""

    async def scene() -> None:
        _, port = await listen(
            KEY, lambda line, _message: line.send(PeerSay(1, 0.0)), lambda _: None
        )
        ready(port)
        await asyncio.Event().wait()

    asyncio.run(scene())


def _probe(ready: Ready) -> None:
    """Run the socket on which robust-task is asked whether it lives."""
    loop = Loop()
    ready(Probe(loop, KEY, "127.0.0.1", lambda _ask: PeerSay(1, 0.0)).port)
    loop.run()


def _tests(ready: Ready) -> None:
    """Run the coordinator of active tests."""
    from health.active.coordinator.server import Server

    async def scene() -> None:
        server = Server(KEY, lambda line, _message: line.send({"ok": 1}), lambda _line: None)
        ready(await server.open("0.0.0.0"))
        await asyncio.Event().wait()

    asyncio.run(scene())


_HELLO = Hello(1, "0", 0, "n0", (0,), 1, 1, 7000, 7001, 0, 0)
LISTENERS: dict[str, tuple[Callable[[Ready], None], bytes]] = {
    "store": (_store, b'{"op":"pull","owner":0,"step":1}'),
    "lanes": (_lanes, b'{"op":"hello","plan":"plan","body":0}'),
    "srun": (_srun, encode(_HELLO)),
    "probe": (_probe, encode(PeerAsk(1))),
    "tests": (_tests, b'{"hello":1}'),
}
"""The product's listeners for other nodes, and what a holder of the key says to each first."""


def _forked(work: Callable[[Ready], None], uid: int, files: int) -> int:
    """Do work as a user in a child; return the number by which it says that it is ready."""
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            os.close(read)
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 2)
            become(uid)
            work(lambda number: void(os.write(write, b"%d\n" % number)))
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.readline()
    if not text.strip():
        raise BenchError(f"{work.__name__} did not start")
    return int(text)


def void(_value: object) -> None:
    """Drop a value."""


def _asked(port: int, words: bytes, deadline: float = 4.0) -> float:
    """Return the seconds until a holder of the key has got an answer, as often as it must try."""
    began = time.monotonic()
    while time.monotonic() < began + deadline:
        codec = Codec(KEY, server=False)
        with (
            contextlib.suppress(OSError, WireError),
            socket.create_connection(("127.0.0.1", port), 2) as sock,
        ):
            sock.sendall(codec.preface())
            got: list[bytes] = []
            while not codec.ready:
                codec.feed(sock.recv(21) or b"no")
            sock.sendall(codec.seal(words))
            while not got:
                if not (data := sock.recv(4096)):
                    break
                got = codec.feed(data)
            if got:
                return time.monotonic() - began
        time.sleep(0.05)
    return deadline


def _crowd(port: int, say: bytes, more: Callable[[int], bytes]) -> Callable[[Ready], None]:
    """Return work that keeps CROWD connections open: each that is closed is opened again.

    ``say``: what each sends at once; ``more(n)``: what one sends every now and then.
    """

    def work(ready: Ready) -> None:
        selector, open_, turn = selectors.DefaultSelector(), dict[socket.socket, int](), 0
        told = 0.0
        began = last = time.monotonic()
        while True:
            now = time.monotonic()
            due = 200 if not told else int((now - last) * RATE)
            last = now if due else last
            for _ in range(min(due, CROWD - len(open_))):
                sock = socket.socket()
                sock.settimeout(0.2)
                try:
                    sock.connect(("127.0.0.1", port))
                    sock.setblocking(False)
                    if say:
                        sock.send(say)
                except OSError:
                    sock.close()
                    break
                open_[sock] = 0
                selector.register(sock, selectors.EVENT_READ)
            for ready_one, _ in selector.select(0.01):
                one: Any = ready_one.fileobj
                try:
                    alive = bool(one.recv(4096))
                except BlockingIOError:
                    continue
                except OSError:
                    alive = False
                if not alive:
                    selector.unregister(one)
                    del open_[one]
                    one.close()
            turn += 1
            for sock in list(open_)[turn % 50 :: 50]:
                with contextlib.suppress(OSError):
                    if data := more(turn):
                        sock.send(data)
            if not told and (len(open_) >= CROWD or time.monotonic() > began + 3):
                told = time.monotonic()
                ready(len(open_))

    return work


def _kept_out(say: bytes = b"", more: Callable[[int], bytes] = lambda _turn: b"") -> Any:
    """Return an attack that keeps holders of the key away from each listener."""

    def attack(_room: Room) -> Got:
        burst, worst, where, threads = 0.0, 0.0, "", 0
        for name, (listener, words) in LISTENERS.items():
            port = _forked(listener, VICTIM, FILES)
            if (quiet := _asked(port, words)) > WITHIN:
                raise BenchError(f"{name} takes {quiet:.1f} s without an attack")
            _forked(_crowd(port, say, more), MALLORY, 8192)
            burst = max(burst, _asked(port, words, 20.0))  # thousands wait to be accepted
            for _ in range(TRIES):
                took = _asked(port, words)
                if took >= worst:
                    worst, where = took, name
                time.sleep(0.1)
            threads = max(threads, _threads())
            _end_children()
        what = (
            f"{CROWD} sockets: a peer with the key is heard after {worst:.2f} s at worst "
            f"({where}; in the first burst {burst:.2f} s); at most {threads} threads"
        )
        return Got(what=what, succeeded=worst > WITHIN or threads > 100)

    return attack


def _children() -> list[int]:
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [int(pid) for pid in text.split()]


def _threads() -> int:
    """Return the most threads that a child has."""
    return max(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in _children())


def _end_children() -> None:
    for pid in _children():
        os.kill(pid, 9)
        os.waitpid(pid, 0)


# -- words of others


def _tape(port: int, words: bytes) -> bytes:
    """Return all that a holder of the key sends to a listener in one conversation."""
    codec = Codec(KEY, server=False)
    with socket.create_connection(("127.0.0.1", port), 5) as sock:
        sent = codec.preface()
        sock.sendall(sent)
        while not codec.ready:
            codec.feed(sock.recv(21))
        sealed = codec.seal(words)
        sock.sendall(sealed)
        sock.settimeout(5)
        sock.recv(4096)
    return sent + sealed


def _reply(port: int, said: Iterator[bytes] | list[bytes], back: bool = False) -> bytes:
    """Return what a listener sends after its preface; ``back``: what it sends is sent back."""
    got = b""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), 5) as sock,
    ):
        sock.settimeout(1.0)
        if back:
            sock.sendall(sock.recv(4096))
        for part in said:
            sock.sendall(part)
        while data := sock.recv(4096):
            got += data
    return got if back else got[21:]


def _spoken(tricks: Callable[[int, bytes], Iterator[tuple[str, bytes]]]) -> Any:
    """Return an attack that is answered by a listener without the key."""

    def attack(_room: Room) -> Got:
        answered: list[str] = []
        tried = 0
        for name, (listener, words) in LISTENERS.items():
            port = _forked(listener, VICTIM, FILES)
            for trick, reply in tricks(port, words):
                tried += 1
                if reply:
                    answered.append(f"{name} {trick}")
            if _asked(port, words) > WITHIN:
                answered.append(f"{name} does not serve any more")
            _end_children()
        what = ", ".join(answered) or f"{tried} tries at {len(LISTENERS)} listeners, no answer"
        return Got(what=what, succeeded=bool(answered))

    return attack


def _replays(port: int, words: bytes) -> Iterator[tuple[str, bytes]]:
    tape = _tape(port, words)
    yield "a whole conversation again", _reply(port, [tape])
    yield (
        "its second half under a new preface",
        _reply(port, [Codec(KEY, server=False).preface(), tape[21:]]),
    )
    yield "twice", _reply(port, [tape, tape[21:]])


def _reflections(port: int, words: bytes) -> Iterator[tuple[str, bytes]]:
    yield "its own preface", _reply(port, [bytes(60)], back=True)
    with socket.create_connection(("127.0.0.1", port), 5) as other:
        yield "the preface that another connection got", _reply(port, [other.recv(21), bytes(60)])
    tape = _tape(port, words)
    yield "a frame of the other direction", _reply(port, [tape[21:]], back=True)


def _downgrades(port: int, words: bytes) -> Iterator[tuple[str, bytes]]:
    forged = len(words).to_bytes(4, "big") + bytes(16) + words
    for version in (0, VERSION - 1, VERSION + 1, 255):
        said = MAGIC + bytes([version]) + bytes(16) + forged
        yield f"version {version}", _reply(port, [said])
    yield "no preface", _reply(port, [forged])
    yield "plain JSON", _reply(port, [words + b"\n"])
    yield "a short key", _reply(port, [MAGIC + bytes([VERSION]) + bytes(16), forged[:4] + words])


# -- the meeting place of a node's shims


def _name_taken(_room: Room) -> Got:
    """Take the name of an agent that dies, so that its successor or its shims meet the attacker."""
    from srun_wrapper.agent.connections.shims import Shims
    from srun_wrapper.agent.place import Place

    place = Place(12, "0", 0, "n0", 0, 0, 2, 1, 2, 0, "127.0.0.1", 1)

    def agent(ready: Ready) -> None:
        """Run the node's agent."""
        loop = Loop()
        run_dir = Path(tempfile.mkdtemp(prefix="robust-12.0-", dir="/dev/shm"))
        calls: dict[str, Any] = dict.fromkeys(("joined", "died", "lost"), void)
        Shims(loop, place, KEY, run_dir, heard=lambda *_: None, **calls)
        ready(1)
        loop.run()

    _forked(agent, VICTIM, FILES)
    before = _seen()
    _end_children()
    taken: queue.SimpleQueue[str] = queue.SimpleQueue()

    def take(ready: Ready) -> None:
        """Bind every name that the dead agent had."""
        count = 0
        for name in before:
            sock = socket.socket(socket.AF_UNIX)
            with contextlib.suppress(OSError):
                if not name.startswith("@"):
                    with contextlib.suppress(OSError):
                        Path(name).unlink()
                sock.bind(name.replace("@", "\0", 1))
                sock.listen(100)
                count += 1
                taken.put(name)
            globals().setdefault("_held", []).append(sock)
        ready(count)
        threading.Event().wait()

    got = _forked(take, MALLORY, FILES)
    try:
        _forked(agent, VICTIM, FILES)
        again = True
    except (BenchError, ValueError):
        again = False
    what = (
        f"{len(before)} names seen, {got} taken; the next agent {'listens' if again else 'fails'}"
    )
    for path in Path("/dev/shm").glob("robust-12.0-*"):
        for each in path.iterdir():
            each.unlink()
        path.rmdir()
    return Got(what=what, succeeded=got > 0 or not again)


def _seen() -> list[str]:
    """Return the names of sockets as anybody sees them."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    names = {line.split()[-1] for line in lines if len(line.split()) > 7}
    ours = ("@robust-", "/dev/shm/robust-12.0-")
    return sorted(name for name in names if name.startswith(ours))


ATTACKS = [
    Attack(
        name="sockets_idle",
        row="wire",
        tries=f"{CROWD} connections without the key, to every listener, that say nothing",
        run=_kept_out(),
        seconds=240,
    ),
    Attack(
        name="sockets_that_greet",
        row="wire",
        tries=f"{CROWD} connections with a right preface, which needs no key",
        run=_kept_out(MAGIC + bytes([VERSION]) + bytes(16)),
        seconds=240,
    ),
    Attack(
        name="sockets_that_drip",
        row="wire",
        tries=f"{CROWD} connections that send a long first frame, a byte now and then",
        run=_kept_out(
            MAGIC + bytes([VERSION]) + bytes(16) + (60_000).to_bytes(4, "big"),
            lambda _turn: b"x" * 100,
        ),
        seconds=240,
    ),
    Attack(
        name="sockets_that_break",
        row="wire",
        tries="connections that send what no peer sends, are closed, and come again",
        run=_kept_out(b"GET / HTTP/1.1\r\n\r\n"),
        seconds=240,
    ),
    Attack(
        name="wire_replay",
        row="wire",
        tries="to send again what a holder of the key has sent",
        run=_spoken(_replays),
        seconds=240,
    ),
    Attack(
        name="wire_reflection",
        row="wire",
        tries="to send a listener its own words as a proof",
        run=_spoken(_reflections),
        seconds=240,
    ),
    Attack(
        name="wire_downgrade",
        row="wire",
        tries="to speak an older, a newer or no version of the wire",
        run=_spoken(_downgrades),
        seconds=240,
    ),
    Attack(
        name="agent_name_taken",
        row="wire",
        tries="to take the name of the socket where a node's shims meet, when the agent dies",
        run=_name_taken,
    ),
]
