"""The coordinator's side of a run of active tests: workers, tasks and answers (asyncio).

Each expected worker has a slot: a node and a local number. A slot goes from waiting to ready to
gone, never back, and keeps the reason why it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from health.active.coordinator.server import Server, WorkerLink
from health.active_tests import Measured, measured

GOODBYE_S = 2.0  # for workers to end after the request to quit


class WorkerError(Exception):
    """A worker gave no answer that can be used; the text says which one, during what and why."""


class About(NamedTuple):
    """A worker's own description. ``host``: its address, as the coordinator's peers see it."""

    torch: str
    backend: str
    devices: tuple[str, ...]
    models: tuple[str, ...]
    host: str


class _Slot:
    """The slot of one expected worker, and the worker's state."""

    def __init__(self, node: str, local: int, several: bool) -> None:
        self.who = f"the worker on {node}" + (f" (task {local})" if several else "")
        self.link: WorkerLink | None = None
        self.about: About | None = None
        self.gone = ""
        self.test = ""  # what it works on
        self.id = 0
        self.answer: asyncio.Future[dict[str, Any]] | None = None
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def ready(self) -> bool:
        return self.about is not None and not self.gone

    def end(self, why: str) -> None:
        """End the slot: no more will come from it, and the first reason counts."""
        self.gone = self.gone or why
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(WorkerError(self.gone))
        self.idle.set()


class TestSession:
    """Waits for workers and gives them work, one task at a time each.

    ``expected``: node -> how many workers it will have. ``key`` (default: a new one) is for the
    workers' environment and must be shown to nobody.
    """

    def __init__(self, expected: Mapping[str, int], key: bytes | None = None) -> None:
        self.key = key or secrets.token_bytes(32)
        self.port = 0
        self._slots = {
            (node, local): _Slot(node, local, count > 1)
            for node, count in expected.items()
            for local in range(count)
        }
        self._settled = asyncio.Event()
        self._server = Server(self.key, self._message, self._closed)
        self._at: dict[WorkerLink, _Slot] = {}
        self._ids = 0
        self._waited = 0.0

    async def open(self, host: str = "0.0.0.0") -> int:
        """Listen; the port. Raises OSError."""
        self.port = await self._server.open(host)
        return self.port

    def worker_env(self, host: str, node: str, local: int = 0) -> dict[str, str]:
        """The environment of the worker for a slot; ``host``: our address as its node sees it."""
        return {
            "ROBUST_TEST_SERVER": address(host, self.port),
            "ROBUST_TEST_KEY": self.key.hex(),
            "ROBUST_TEST_NODE": node,
            "ROBUST_TEST_LOCAL": str(local),
        }

    async def gather(self, timeout: float) -> None:
        """Wait until every slot is ready or gone, or ``timeout`` seconds are over."""
        self._settle()
        self._waited += timeout
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), timeout)

    def lost(self, node: str, why: str, local: int | None = None) -> None:
        """Mark the node's workers as gone: the launcher reports that they ended or will not start.

        ``local``: only this one. A connected worker is left alone: its connection ends when it
        does.
        """
        for (name, number), slot in self._slots.items():
            if name == node and slot.link is None and local in (None, number):
                slot.end(why)
        self._settle()

    def ready(self, node: str) -> tuple[int, ...]:
        """The local numbers of the workers of a node that can be given work."""
        return tuple(n for (name, n), slot in self._slots.items() if name == node and slot.ready)

    def idle(self, node: str, local: int = 0) -> bool:
        """True if the worker there is ready and owes no answer."""
        slot = self._slots.get((node, local))
        return slot is not None and slot.ready and slot.idle.is_set()

    def missing(self, node: str) -> tuple[str, ...]:
        """The reasons that workers of the node cannot test, a line each; empty if all are ready."""
        slots = [slot for (name, _), slot in self._slots.items() if name == node]
        if not slots:
            return (f"no worker was started on {node}",)
        return tuple(slot.gone or self._why(slot) for slot in slots if not slot.ready)

    def _why(self, slot: _Slot) -> str:
        if slot.link is None:
            return (
                f"{slot.who} did not connect within {self._waited:g} s; check that the node can "
                f"reach this one (port {self.port}) and read the output of its step"
            )
        return f"{slot.who} connected, but did not import torch within {self._waited:g} s"

    def about(self, node: str, local: int = 0) -> About:
        """Return the description of a worker that is or was ready. KeyError for another."""
        about = self._slots[node, local].about
        if about is None:
            raise KeyError(node)
        return about

    async def ask(
        self, node: str, task: Mapping[str, Any], timeout: float, local: int = 0
    ) -> list[Measured]:
        """Request one test of a worker; any failure becomes one Measured with ``error``."""
        test = str(task.get("test", ""))
        try:
            answer = await self.request(node, task, timeout, local)
            return _measured(answer, node, test)
        except WorkerError as err:
            return [Measured(test, node, error=str(err))]

    async def request(
        self, node: str, task: Mapping[str, Any], timeout: float, local: int = 0
    ) -> dict[str, Any]:
        """A worker's answer to a task. Raises WorkerError.

        A worker that is late with an earlier answer is waited for, within the same ``timeout``.
        """
        slot = self._slots.get((node, local))
        test = str(task.get("test", ""))
        if slot is None:
            raise WorkerError(f"no worker was started on {node}")
        before = slot.test
        try:
            async with asyncio.timeout(timeout):
                while not slot.idle.is_set():
                    await slot.idle.wait()
                before = ""
                return await self._send(slot, task, test)
        except TimeoutError:
            still = f": it is still busy with {before}" if before else ""
            said = f"{slot.who} did not answer {test} within {timeout:.3g} s{still}"
            raise WorkerError(said) from None

    async def _send(self, slot: _Slot, task: Mapping[str, Any], test: str) -> dict[str, Any]:
        if slot.link is None or not slot.ready:
            raise WorkerError(slot.gone or self._why(slot))
        self._ids += 1
        slot.id, slot.test = self._ids, test
        slot.answer = asyncio.get_running_loop().create_future()
        # After Ctrl-C nobody awaits the answer, and asyncio would log its exception as unretrieved.
        slot.answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        slot.idle.clear()
        slot.link.send({**task, "id": slot.id})
        return await slot.answer

    async def close(self, patience: float = GOODBYE_S) -> None:
        """Ask all workers to quit, and close the connections left after ``patience`` seconds."""
        await self._server.close({"quit": True}, patience)
        for slot in self._slots.values():
            slot.end(f"{slot.who} was asked to exit")

    # -- what comes from workers

    def _message(self, link: WorkerLink, message: dict[str, Any]) -> None:
        slot = self._at.get(link)
        if slot is None:
            self._hello(link, message.get("hello"))
        elif slot.about is None:
            self._introduced(slot, message)
        elif message.get("id") == slot.id and not slot.idle.is_set():
            if slot.answer is not None and not slot.answer.done():
                slot.answer.set_result(message)
            slot.test = ""
            slot.idle.set()

    def _hello(self, link: WorkerLink, hello: Any) -> None:
        where = (hello.get("node"), hello.get("local", 0)) if isinstance(hello, dict) else None
        try:
            slot = self._slots.get(where) if where else None  # type: ignore[arg-type]
        except TypeError:  # of something that is no key
            slot = None
        if slot is None or slot.link is not None or slot.gone:
            link.end({"quit": True})  # not expected, or the second for its slot
            return
        slot.link = link
        self._at[link] = slot

    def _introduced(self, slot: _Slot, message: dict[str, Any]) -> None:
        unable, ready = message.get("unable"), message.get("ready")
        if isinstance(ready, dict):
            assert slot.link is not None
            slot.about = About(
                str(ready.get("torch", ""))[:60],
                str(ready.get("backend", ""))[:60],
                _texts(ready.get("devices")),
                _texts(ready.get("models")),
                str(ready.get("host") or slot.link.peer)[:255],
            )
        else:
            why = (
                unable if unable else f'its first message was not "ready" but {str(message)[:100]}'
            )
            slot.end(f"{slot.who} cannot test: {str(why)[:500]}")
        self._settle()

    def _closed(self, link: WorkerLink) -> None:
        slot = self._at.pop(link, None)
        if slot is None:
            return
        during = f" during {slot.test}" if slot.test else ""
        if slot.about is None:
            during = " while it imported torch"
        detail = f" ({link.broken})" if link.broken else ""
        slot.end(f"{slot.who} ended{during}{detail}")
        self._settle()

    def _settle(self) -> None:
        if all(slot.about is not None or slot.gone for slot in self._slots.values()):
            self._settled.set()


def address(host: str, port: int) -> str:
    """Return the address as one word, "[::1]:4000" where the host has colons itself."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(str(item)[:120] for item in value[:64]) if isinstance(value, list) else ()


def _measured(answer: dict[str, Any], node: str, test: str) -> list[Measured]:
    """Read the measurements of an answer, as of this node and test whatever names they carry."""
    rows = answer.get("measured")
    try:
        if not isinstance(rows, list) or not rows:
            raise ValueError("it holds none")
        found = [measured(row) for row in rows]
        if not all(math.isfinite(n) for one in found for n in (*one.values.values(), one.seconds)):
            raise ValueError("a number in it is not finite")
    except (ValueError, TypeError, OverflowError, AttributeError) as err:
        text = json.dumps(answer, default=str)[:100]
        said = f"the worker on {node} answered {test} with no measurement: {err}: {text}"
        raise WorkerError(said) from None
    return [one._replace(test=test, node=node) for one in found]
