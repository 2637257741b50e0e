"""The coordinator's end of a run of active tests: who has come, and what they answer (asyncio).

A worker is expected at a place: a node and a local number. What is known of each place only ever
gets better known: it is waited for, or ready, or gone for a reason that can be shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from health.active.coordinator.server import Link, Server
from health.active.model import Measured, measured

GOODBYE_S = 2.0  # for workers to end after they were told to


class WorkerError(Exception):
    """A worker gave no answer that can be used; the text says which one, during what and why."""


class About(NamedTuple):
    """A worker's own description. ``host``: its address, as the coordinator's peers see it."""

    torch: str
    backend: str
    devices: tuple[str, ...]
    models: tuple[str, ...]
    host: str


class _Place:
    """The slot of one expected worker, and the worker's state."""

    def __init__(self, node: str, local: int, several: bool) -> None:
        self.who = f"the worker on {node}" + (f" (task {local})" if several else "")
        self.link: Link | None = None
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
        """Nothing more will come from here: the first reason counts."""
        self.gone = self.gone or why
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(WorkerError(self.gone))
        self.idle.set()


class Session:
    """Waits for workers and gives them work, one task at a time each.

    ``expected``: node -> how many workers it will have. ``key`` (default: a new one) is for the
    workers' environment and must be shown to nobody.
    """

    def __init__(self, expected: Mapping[str, int], key: bytes | None = None) -> None:
        self.key = key or secrets.token_bytes(32)
        self.port = 0
        self._places = {
            (node, local): _Place(node, local, count > 1)
            for node, count in expected.items()
            for local in range(count)
        }
        self._settled = asyncio.Event()
        self._server = Server(self.key, self._message, self._closed)
        self._at: dict[Link, _Place] = {}
        self._ids = 0
        self._waited = 0.0

    async def open(self, host: str = "0.0.0.0") -> int:
        """Listen; the port. Raises OSError."""
        self.port = await self._server.open(host)
        return self.port

    def worker_env(self, host: str, node: str, local: int = 0) -> dict[str, str]:
        """The environment of the worker for a place; ``host``: our address as its node sees it."""
        return {
            "ROBUST_TEST_SERVER": address(host, self.port),
            "ROBUST_TEST_KEY": self.key.hex(),
            "ROBUST_TEST_NODE": node,
            "ROBUST_TEST_LOCAL": str(local),
        }

    async def gather(self, timeout: float) -> None:
        """Until every place is ready or gone, or ``timeout`` seconds are over."""
        self._look()
        self._waited += timeout
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), timeout)

    def lost(self, node: str, why: str, local: int | None = None) -> None:
        """The launcher knows that no worker will come from there (any more); one, or all of them.

        One whose connection stands is not touched: that ends when the worker does.
        """
        for (name, number), place in self._places.items():
            if name == node and place.link is None and local in (None, number):
                place.end(why)
        self._look()

    def ready(self, node: str) -> tuple[int, ...]:
        """The local numbers of the workers of a node that can be given work."""
        return tuple(n for (name, n), place in self._places.items() if name == node and place.ready)

    def idle(self, node: str, local: int = 0) -> bool:
        """True if the worker there is ready and owes no answer."""
        place = self._places.get((node, local))
        return place is not None and place.ready and place.idle.is_set()

    def missing(self, node: str) -> tuple[str, ...]:
        """The reasons that workers of the node cannot test, a line each; empty if all are ready."""
        places = [place for (name, _), place in self._places.items() if name == node]
        if not places:
            return (f"no worker was started on {node}",)
        return tuple(place.gone or self._why(place) for place in places if not place.ready)

    def _why(self, place: _Place) -> str:
        if place.link is None:
            return (
                f"{place.who} has not come within {self._waited:g} s; see that the node reaches "
                f"this one (port {self.port}) and what its step printed"
            )
        return f"{place.who} came, but torch was not imported within {self._waited:g} s"

    def about(self, node: str, local: int = 0) -> About:
        """Of a worker that is or was ready. KeyError for another."""
        about = self._places[node, local].about
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
        place = self._places.get((node, local))
        test = str(task.get("test", ""))
        if place is None:
            raise WorkerError(f"no worker was started on {node}")
        before = place.test
        try:
            async with asyncio.timeout(timeout):
                while not place.idle.is_set():
                    await place.idle.wait()
                before = ""
                return await self._send(place, task, test)
        except TimeoutError:
            still = f": it is still busy with {before}" if before else ""
            said = f"{place.who} gave no answer to {test} within {timeout:.3g} s{still}"
            raise WorkerError(said) from None

    async def _send(self, place: _Place, task: Mapping[str, Any], test: str) -> dict[str, Any]:
        if place.link is None or not place.ready:
            raise WorkerError(place.gone or self._why(place))
        self._ids += 1
        place.id, place.test = self._ids, test
        place.answer = asyncio.get_running_loop().create_future()
        # Whoever waits may be gone (Ctrl-C) when the worker is: nobody is to be told then.
        place.answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        place.idle.clear()
        place.link.send({**task, "id": place.id})
        return await place.answer

    async def close(self, patience: float = GOODBYE_S) -> None:
        """Tell all to end, and close what does not within so many seconds."""
        await self._server.close({"quit": True}, patience)
        for place in self._places.values():
            place.end(f"{place.who} was told to end")

    # -- what comes from workers

    def _message(self, link: Link, message: dict[str, Any]) -> None:
        place = self._at.get(link)
        if place is None:
            self._hello(link, message.get("hello"))
        elif place.about is None:
            self._introduced(place, message)
        elif message.get("id") == place.id and not place.idle.is_set():
            if place.answer is not None and not place.answer.done():
                place.answer.set_result(message)
            place.test = ""
            place.idle.set()

    def _hello(self, link: Link, hello: Any) -> None:
        where = (hello.get("node"), hello.get("local", 0)) if isinstance(hello, dict) else None
        try:
            place = self._places.get(where) if where else None  # type: ignore[arg-type]
        except TypeError:  # of something that is no key
            place = None
        if place is None or place.link is not None or place.gone:
            link.end({"quit": True})  # not expected, or the second for its place
            return
        place.link = link
        self._at[link] = place

    def _introduced(self, place: _Place, message: dict[str, Any]) -> None:
        unable, ready = message.get("unable"), message.get("ready")
        if isinstance(ready, dict):
            assert place.link is not None
            place.about = About(
                str(ready.get("torch", ""))[:60],
                str(ready.get("backend", ""))[:60],
                _texts(ready.get("devices")),
                _texts(ready.get("models")),
                str(ready.get("host") or place.link.peer)[:255],
            )
        else:
            why = unable if unable else f"it said {str(message)[:100]}, and not that it is ready"
            place.end(f"{place.who} cannot test: {str(why)[:500]}")
        self._look()

    def _closed(self, link: Link) -> None:
        place = self._at.pop(link, None)
        if place is None:
            return
        during = f" during {place.test}" if place.test else ""
        if place.about is None:
            during = " while it imported torch"
        detail = f" ({link.broken})" if link.broken else ""
        place.end(f"{place.who} ended{during}{detail}")
        self._look()

    def _look(self) -> None:
        if all(place.about is not None or place.gone for place in self._places.values()):
            self._settled.set()


def address(host: str, port: int) -> str:
    """As one word, "[::1]:4000" where the host has colons itself."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(str(item)[:120] for item in value[:64]) if isinstance(value, list) else ()


def _measured(answer: dict[str, Any], node: str, test: str) -> list[Measured]:
    """The measurements in an answer: of this node and this test, whatever it says it is."""
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
