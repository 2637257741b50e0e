"""The rank's side of its node's data process: the same steps, made by a process that outlives it.

robust-task keeps that process (``srun_wrapper/agent/data/``): the rank asks at its door, says what
it needs, and is told the socket. Standard library only, but for the arrays' own numpy.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robust_slurm.data import errors
from robust_slurm.data.errors import DataError
from robust_slurm.data.exchange.placement import VARIABLE
from robust_slurm.data.service import pages, wire
from robust_slurm.data.service.in_hand import StepsInHand
from robust_slurm.data.service.ring import MEMORY
from robust_slurm.frames import json_lines

if TYPE_CHECKING:
    from robust_slurm.resizing.world import TrainingWorld

START = 180.0  # s for a data process to start: its interpreter may be on a slow file system
SILENCE = 30.0  # s without a word of one that runs, which says something every second
TURN = 5.0  # s that are waited at a time: both processes may be stopped for hours meanwhile
PATIENCE = 60.0  # s for it to be back after its death, in all
DOOR = "data.sock"


class ProcessGone(Exception):
    """This rank has no data process, and must prepare its data itself. The text says why."""


def door() -> str:
    """Return the path of the door of this node's robust-task; "" where there is none."""
    directory = os.environ.get("ROBUST_BEAT_DIR", "")
    if not directory or "ROBUST_REPLAY" in os.environ:  # a replay leaves no trace
        return ""
    path = Path(directory) / DOOR
    return str(path) if path.exists() else ""


class NodeSteps:
    """The steps of a plan, for a rank of a world. Not for several threads at once.

    Arrays are private mappings of memory that is shared and sealed: reading copies nothing, and
    what is written in place is seen by nobody else, nor when the step is repeated. It is
    freed with the last array of the step, however long the training keeps it.

    Some of the steps that are made already are in hand here, as descriptors: as long as there is
    one, nothing is waited for, and a data process that is being started again is not missed.
    """

    def __init__(
        self, name: str, world: TrainingWorld, memory: int = MEMORY, code: str | None = None
    ) -> None:
        """Connect. ``name``: of the plan (module:attribute); ``memory``: bytes of the steps that
        the data process holds; ``code``: what ``code_of`` returns. Raises ProcessGone, and
        DataError if the plan cannot be made."""
        sizes = {"world": world.size, "original": world.original, "beside": _beside()}
        code = code_of(name) if code is None else code
        self._request = request(name, world.original, memory, code)
        self._socket = _socket_of(self._request)
        self._hello = {"op": "hello", "rank": world.rank, **sizes}
        self._state: Any = None  # after the step that was returned last
        self._hand = StepsInHand()  # those that follow it
        self._owner = os.getpid()
        self._lease: wire.LineSocket | None = None
        self._line: wire.LineSocket | None = None
        self._welcomed = False  # on this line
        self._failed = False  # the plan cannot be made: raised when nothing is in hand
        self._due = False  # a request is not answered completely yet
        self.shares: tuple[int, ...] = ()
        """This rank's."""
        self._retry(self._connect)

    def seek(self, state: Any) -> None:
        """Go on after ``state`` (JSON values; None: from the beginning)."""
        self._state = state
        self._hand.clear()
        if self._due:  # steps of another place may be on their way
            self._leave()
        self._retry(lambda: self._say({"op": "seek", "state": state}))

    def next(self) -> tuple[int, dict[int, dict[str, Any]], Any]:
        """Return the next step's number, this rank's rows by share, and the state after it.

        Raises DataError; ProcessGone if the data process has died and does not come back: the
        state to go on from is what was returned last.
        """
        if self._owner != os.getpid():  # a fork: the line is the parent's
            self._hand.clear()
        else:
            self._collect()
        if self._hand:
            self._keep_up()
            step = self._hand.take()
        else:
            step = self._retry(self._take)
        rows = {share: pages.read(fd, head) for share, head, fd in step.pages}
        self._state = step.state
        return step.number, rows, step.state

    def identity(self) -> dict[str, Any]:
        """Return ``Plan.identity``. Raises as ``next``."""
        return dict(self._retry(self._ask_identity))

    def close(self) -> None:
        """Leave the data process; it stays for whoever comes next."""
        self._hand.clear()
        self._leave()

    # -- inside

    def _retry(self, do: Any) -> Any:
        """Do it; if the data process dies, again when it is back."""
        until = 0.0
        while True:
            try:
                self._connect()
                return do()
            except OSError as err:
                self._leave()
                now = time.monotonic()
                until = until or now + PATIENCE
                if now >= until:
                    raise ProcessGone(f"it does not come back: {err}") from err
                time.sleep(0.05)

    def _connect(self) -> None:
        self._failed = False
        try:
            if self._line is None or self._owner != os.getpid():
                self._begin()
            if not self._welcomed:
                self._finish()
        except BaseException:
            self._leave()
            raise

    def _begin(self) -> None:
        """Ask for the data process, and greet it, without waiting for an answer."""
        self._leave()
        self._owner = os.getpid()
        path = door()
        if not path:
            raise ProcessGone("no robust-task keeps one")
        self._lease = _open(path)
        self._lease.send(self._request)
        there = Path(path).with_name(self._socket)
        try:  # it exists already, except for the very first rank: ask both
            self._line = _open(str(there))
            self._greet()
        except OSError:
            if self._line is not None:  # after half a greeting it would wait for the rest
                self._line.close()
                self._line = None

    def _finish(self) -> None:
        """Wait until robust-task and the data process have answered."""
        if self._lease is None:
            raise wire.Closed("not connected")
        answer = self._lease.receive(SILENCE)
        if answer is None:
            raise ProcessGone(f"robust-task does not answer within {SILENCE:g} s")
        if answer[0]["op"] != "here":
            raise ProcessGone(str(answer[0].get("why")))
        if self._line is None:
            self._line = _open(str(answer[0].get("path")))
            self._greet()
        self._hear(("welcome",), SILENCE if answer[0].get("served") else START)

    def _leave(self) -> None:
        """Close both connections. What is in hand stays there."""
        for line in (self._line, self._lease):
            if line is not None:
                line.close()
        self._line = self._lease = None
        self._welcomed = self._due = False

    def _greet(self) -> None:
        cpus = sorted(os.sched_getaffinity(0))
        nodes = os.environ.get(VARIABLE, "")
        state = self._hand.state(self._state)
        more = {"cpus": cpus, "nodes": nodes, "state": state}
        more["later"] = bool(self._hand)
        self._say({**self._hello, **more})

    def _collect(self) -> None:
        """Take what has come, without waiting. Errors count only once nothing is in hand."""
        try:
            while self._line is not None and self._listen(0.0) is not None:
                pass
        except (OSError, DataError) as err:
            self._leave()
            self._failed = isinstance(err, DataError)  # another process would say the same

    def _keep_up(self) -> None:
        """Tell which step of those in hand is taken now, and ask for further ones, also without
        waiting."""
        try:
            if self._line is None and not self._failed:
                self._begin()
            elif self._welcomed and not self._due:
                self._ask("take", self._hand.room() + 1, name=self._hand.first())
        except (OSError, DataError, ProcessGone):
            self._leave()

    def _take(self) -> Any:
        if self._due and not self._hand:
            self._hear(("step", "none"), SILENCE)
        if not self._hand:
            self._ask("next", self._hand.room())
            self._hear(("step",), SILENCE)
        return self._hand.take()

    def _ask(self, what: str, more: int, **also: str) -> None:
        self._say({"op": what, "more": more, **also})
        self._due = True

    def _ask_identity(self) -> Any:
        self._say({"op": "identity"})
        return self._hear(("identity",), SILENCE)["plan"]

    def _say(self, message: dict[str, Any]) -> None:
        if self._line is None:
            raise wire.Closed("not connected")
        self._line.send(message)

    def _hear(self, wanted: tuple[str, ...], silence: float) -> dict[str, Any]:
        """Return the answer that is wanted. Raises DataError for a failure, OSError; ProcessGone
        after so many seconds without a word."""
        while True:
            got, left = None, silence
            while got is None and left > 0:
                got = self._listen(min(TURN, left))
                left -= TURN
            if got is None:
                self._leave()
                raise ProcessGone(f"it has said nothing for {silence:g} s")
            silence = SILENCE
            if got["op"] in wanted:
                return got

    def _listen(self, seconds: float) -> dict[str, Any] | None:
        """Return the next word within ``seconds``, after noting it. Raises DataError for a
        failure, OSError."""
        if self._line is None:
            raise wire.Closed("not connected")
        got = self._line.receive(seconds)
        if got is None:
            return None
        message, fds = got
        if message["op"] == "step":
            self._hand.add(message, fds)
            self._due = message.get("left", 0) > 0
            return message
        for fd in fds:
            os.close(fd)
        if message["op"] in ("none", "failed"):
            self._due = False
        if message["op"] == "failed":
            raise _error(message)
        if message["op"] == "welcome":
            self.shares = tuple(int(share) for share in message["shares"])
            self._welcomed = True
        return message


def _beside() -> int:
    """Return the number of ranks on this node; 1 if it is not known."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else 1


def request(name: str, original: int, memory: int, code: str) -> dict[str, Any]:
    """Return what robust-task needs to start the data process as this rank would. The process
    stays when the job goes on with fewer ranks: to it, WORLD_SIZE is that of the beginning."""
    path = [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100 - "" is here
    return {
        "op": "ask",
        "name": name,
        "python": sys.executable,
        "main": str(Path(__file__).with_name("main.py")),
        "path": path,
        "directory": os.getcwd(),  # noqa: PTH109
        "original": original,
        "code": code,
        "memory": memory,
        "environ": {**os.environ, "WORLD_SIZE": str(original)},
    }


def _socket_of(request: dict[str, Any]) -> str:
    parts = ("name", "original", "code", "memory", "python", "main", "path", "directory")
    return wire.socket_name(*(request[part] for part in parts))


def code_of(name: str) -> str:
    """Return a text that changes with the job's version of the code and with the plan's own file,
    and is the same on all nodes."""
    version = os.environ.get("ROBUST_CODE_VERSION", "")
    try:
        from importlib.util import find_spec

        spec = find_spec(name.partition(":")[0])
        content = Path((spec.origin if spec is not None else None) or "").read_bytes()
    except Exception:  # noqa: BLE001 - the data process says what is wrong with it
        return version
    return f"{version} {hashlib.blake2b(content, digest_size=16).hexdigest()}"


def expect_code(name: str, code: str) -> None:
    """Raise DataError if the plan's code is another now."""
    if code_of(name) != code:
        raise DataError(
            f"the file of {name} has changed since the ranks were started: those on other nodes "
            "have steps of the one before"
        )


def _open(path: str) -> wire.LineSocket:
    """Connect. Raises OSError; DataError if another user listens there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(SILENCE)
        sock.connect(path)
        uid = json_lines.peer(sock)[1]
    except OSError:
        sock.close()
        raise
    if not json_lines.ours(uid):
        sock.close()
        raise DataError(f"{path} is of user {uid}: not a data process of this job")
    return wire.LineSocket(sock)


def _error(message: dict[str, Any]) -> DataError:
    kind = getattr(errors, str(message.get("kind")), DataError)
    known = isinstance(kind, type) and issubclass(kind, DataError)
    if kind is errors.EndOfData:
        return errors.EndOfData(str(message.get("why")))
    where = "the data process says more in the job's output"
    return (kind if known else DataError)(f"{message.get('why')} ({where})")
