"""A rank's line to its store: one unix stream socket, one JSON object a line.

Nothing here waits without a bound: a store that is dead or does not answer costs training a
deadline once, and then nothing. Standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

MAX_LINE = 16 << 20
SEND_DEADLINE = 10.0  # s; the store reads at once, or something is wrong with it


class StoreGoneError(Exception):
    """No store is at the other end (any more); the text says which and why."""


class Client:
    """The connection. ``say`` may be called from any thread."""

    def __init__(self, path: str, enrol: Mapping[str, Any], *, deadline: float = 30.0) -> None:
        """Connect and enrol. Raises StoreGoneError within ``deadline`` seconds."""
        self.path = path
        self.dead = ""
        """Reason why there is no store any more; empty while there is one."""
        self._state = threading.Condition()
        self._sending = threading.Lock()
        self._kept = self._answered = self._newest = -1
        self._held: frozenset[int] = frozenset()
        self._unanswered: dict[int, int] = {}  # step → slot, until the store has its digest
        self._wanted: set[int] = set()
        self._every = [(0, 1)]  # (first step, steps between two saves)
        self._said_at = (-1, 0.0)  # step, time of the newest saved
        self.everywhere = -1
        """Newest step that all ranks are known to have, and their replicas."""
        self._passed = -1  # no rank has a step up to this on its way; some may lack it
        self.waits_for_all = False
        """A step is safe only when all ranks are past it: its slot may be all there is."""
        self.safe_s = 0.0
        """Time from a step's ``saved`` until it was safe: the newest that was measured."""
        self._flushed: dict[str, Any] | None = None
        self._stand = -1
        self.unshare = False
        """The ranks that share a state no longer hold the same."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(deadline)
        try:
            self._socket.connect(path)
            self._file = self._socket.makefile("rb")
            self._write({"op": "enrol", **enrol})
            # "wait" comes while the store fetches the rank's files; others are news for all ranks.
            while (message := self._read()).get("op") not in ("welcome", "refused"):
                self._hear(message)
            self.welcome = message
            if self.welcome.get("op") != "welcome":
                raise OSError(str(self.welcome.get("why", "it rejects this rank")))
        except (OSError, ValueError) as error:
            self._socket.close()
            raise StoreGoneError(f"no checkpoint store at {path}: {error}") from None
        self._socket.settimeout(None)
        self._change_every(self.welcome)
        self._stand = int(self.welcome.get("stand", -1))
        threading.Thread(target=self._listen, name="robust-store", daemon=True).start()

    def say(self, op: str, **fields: Any) -> None:
        """Send one message; when the store is gone, it is dropped."""
        if self.dead:
            return
        try:
            self._write({"op": op, **fields})
        except OSError as error:
            self._die(f"{self.path}: {error}")

    def saved(self, step: int, slot: int, *, persist: bool, **fields: Any) -> None:
        """Report a complete snapshot; its slot is held until the store has answered."""
        with self._state:
            self._unanswered[step] = slot
            self._newest = step
            if self._is_safe(self._said_at[0]):  # else that one is still being timed
                self._said_at = step, time.monotonic()
        self.say("saved", step=step, slot=slot, persist=persist, **fields)

    def skipped(self, step: int) -> None:
        """Report that this step is left out: no rank needs to wait until this one has it."""
        with self._state:
            self._newest = max(self._newest, step)
        self.say("skipped", step=step)

    def wants(self, step: int) -> bool:
        """True if this step was ordered for the durable tier."""
        with self._state:
            return step in self._wanted

    def is_due(self, step: int) -> bool:
        """True if this step is to be saved in memory."""
        with self._state:
            every = next(every for first, every in reversed(self._every) if step >= first)
            return step % every == 0

    @property
    def every(self) -> int:
        """Steps between two that are saved, as ordered last."""
        with self._state:
            return self._every[-1][1]

    def held(self) -> frozenset[int]:
        """Slots that must not be overwritten now."""
        with self._state:
            if self.dead:
                return frozenset()
            return self._held.union(self._unanswered.values())

    def wait_safe(self, step: int, timeout: float) -> bool:
        """True when ``step`` is digested and replicated (or has no peer), or the store is gone;
        with ``waits_for_all`` on all ranks."""
        return self._wait(lambda: self._is_safe(step), timeout)

    def _is_safe(self, step: int) -> bool:
        here = self._kept >= step and self._answered >= step
        return here and (not self.waits_for_all or self._passed >= step)

    def wait_free(self, slots: int, timeout: float) -> bool:
        """True when fewer than ``slots`` slots are held."""
        return self._wait(lambda: len(self.held()) < slots, timeout)

    def stands_at(self, step: int) -> bool:
        """True if robust-srun compares the state at this step, and the rank must wait for that."""
        with self._state:
            return self._stand == step

    def stand(self, step: int, timeout: float) -> None:
        """Wait until robust-srun has compared this step, or the store is gone."""
        self._wait(lambda: self._stand != step, timeout)

    def flush(self, step: int, timeout: float) -> str:
        """Have this step, the newest, written to the durable tier; "" or why it was not."""
        self._flushed = None
        self.say("flush", step=step)
        if not self._wait(lambda: self._flushed is not None, timeout):
            return f"not written within {timeout:.0f} s"
        answer = self._flushed
        if answer is None:
            return self.dead
        if not answer.get("ok"):
            return str(answer.get("why") or "the store gives no reason")
        written = int(answer.get("step", step))  # not this one if the store could not keep it
        if written == step:
            return ""
        return f"step {step} could not be kept" + (f", step {written} is" if written >= 0 else "")

    def close(self) -> None:
        self._die("closed")

    def abandon(self) -> None:
        """In a forked child: let go of the descriptor; the connection is the parent's."""
        self.dead = "this is a forked child"
        fd = self._socket.detach()
        if fd >= 0:  # else it was a fork of a fork
            os.close(fd)

    def _wait(self, done: Callable[[], bool], timeout: float) -> bool:
        with self._state:
            return self._state.wait_for(lambda: bool(self.dead) or done(), timeout)

    def _write(self, message: Mapping[str, Any]) -> None:
        raw = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if len(raw) > MAX_LINE:
            raise OSError(f"a message of {len(raw)} bytes is too long")
        end = time.monotonic() + SEND_DEADLINE
        with self._sending:
            view = memoryview(raw)
            while view:
                # Non-blocking by flag: the reader shares this socket and must go on blocking.
                try:
                    view = view[self._socket.send(view, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise TimeoutError("the store does not read its messages") from None
                    time.sleep(0.01)

    def _read(self) -> dict[str, Any]:
        line = self._file.readline(MAX_LINE)
        if not line.endswith(b"\n"):
            raise OSError("it ended the connection")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"not a message: {line[:80]!r}")
        return message

    def _listen(self) -> None:
        try:
            while not self.dead:
                message = self._read()
                with self._state:
                    self._hear(message)
                    self._state.notify_all()
        except (OSError, ValueError, TypeError, KeyError) as error:
            self._die(f"{self.path}: {error}")

    def _hear(self, message: Mapping[str, Any]) -> None:
        op = message.get("op")
        if op in ("kept", "unkept"):
            self._kept = max(self._kept, int(message["step"]))
            self._unanswered.pop(int(message["step"]), None)
        if op in ("replicated", "alone", "unkept"):
            self._answered = max(self._answered, int(message["step"]))
        if op in ("kept", "held"):
            key = "held" if op == "kept" else "slots"
            self._held = frozenset(int(slot) for slot in message[key])
        if op == "complete":
            step, passed = int(message["step"]), int(message["passed"])
            if passed <= self._newest:  # else it is of a time before this rank began anew
                self.everywhere = step if step >= 0 else self.everywhere
                self._passed = passed
        if op == "every":
            self._change_every(message)
        if op == "persist_at":
            self._wanted.add(int(message["step"]))
        if op == "stand":
            self._stand = int(message["step"])
        if op == "unshare":
            self.unshare = True
        if op == "flushed":
            self._flushed = dict(message)
        if op == "refused":
            raise OSError(f"it refuses: {message.get('why')}")
        step, began = self._said_at
        if began and self._is_safe(step):
            self.safe_s, self._said_at = time.monotonic() - began, (step, 0.0)

    def _change_every(self, message: Mapping[str, Any]) -> None:
        self._every.append((int(message.get("first", 0)), int(message.get("every", 1))))

    def _die(self, why: str) -> None:
        with self._state:
            self.dead = self.dead or why
            self._state.notify_all()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
        except OSError:
            pass
        self._socket.close()
