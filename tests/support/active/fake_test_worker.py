"""A worker of active tests that measures nothing: it speaks the protocol, and says what it is told.

In the process of the test. Pairs "run" by what the test says of the two nodes, without a network.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from health.active.coordinator.session import TestSession
from robust_slurm.frames.wire import Codec

Answer = Callable[[dict[str, Any]], Any]  # of a task; what follows are answers that are none
DIE = "die"
SILENT = "silent"
CPU = {"torch": "2.13.0", "backend": "gloo", "devices": ["cpu"], "models": ["cpu"]}


class Spoken:
    """One connection to a coordinator, as a worker has it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes):
        self.reader, self.writer = reader, writer
        self.codec = Codec(key, server=False)
        self._waiting: list[bytes] = []

    def say(self, message: Any) -> None:
        raw = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.writer.write(self.codec.seal(raw))

    async def hear(self) -> dict[str, Any] | None:
        """The next message; None: the connection was closed."""
        while not self._waiting:
            try:
                data = await self.reader.read(1 << 16)
            except OSError:
                return None
            if not data:
                return None
            self._waiting += self.codec.feed(data)
        message: dict[str, Any] = json.loads(self._waiting.pop(0))
        return message


async def connect(env: Mapping[str, str], key: bytes | None = None) -> Spoken:
    """Connect up to a worker's preface; ``key``: another one than the session's."""
    host, _, port = env["ROBUST_TEST_SERVER"].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    said = Spoken(reader, writer, key or bytes.fromhex(env["ROBUST_TEST_KEY"]))
    writer.write(said.codec.preface())
    said.codec.feed(await reader.readexactly(21))
    return said


async def introduce(env: Mapping[str, str], **ready: Any) -> Spoken:
    """Connect up to a worker that is ready, with one CPU device unless given otherwise."""
    said = await connect(env)
    local = int(env["ROBUST_TEST_LOCAL"])
    said.say({"hello": {"node": env["ROBUST_TEST_NODE"], "local": local, "pid": 1}})
    said.say({"ready": {**CPU, "host": "127.0.0.1", **ready}})
    return said


async def work(said: Spoken, answer: Answer) -> None:
    """Answer each task until told to quit, or until an answer is DIE."""
    try:
        while task := await said.hear():
            if task.get("quit"):
                return
            given = answer(task)
            if given == DIE:
                return
            if given == SILENT:
                continue
            if isinstance(given, bytes):
                said.say(given)
            elif task["test"] == "listen" and "port" not in given:
                said.say({"id": task["id"], "port": 1, **given})
            else:
                said.say({"id": task["id"], **given})
    finally:
        said.writer.close()


@contextlib.asynccontextmanager
async def fleet(
    answers: Mapping[str, Answer], *, slots: int = 1, **ready: Any
) -> AsyncIterator[TestSession]:
    """A session with a ready worker for each node."""
    session = TestSession(dict.fromkeys(answers, slots))
    await session.open("127.0.0.1")
    tasks = []
    for node, answer in answers.items():
        for local in range(slots):
            said = await introduce(session.worker_env("127.0.0.1", node, local), **ready)
            tasks.append(asyncio.create_task(work(said, answer)))
    try:
        await session.gather(10.0)
        yield session
    finally:
        await session.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def passed(task: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A healthy machine's answer."""
    row: dict[str, Any] = {"test": task["test"], "device": "cpu", "model": "cpu", "seconds": 0.1}
    if task["test"] == "bitwise":
        row["digests"] = {"dense/cpu": "aa"}
    if task["test"] in ("pair", "ring"):
        row |= {"device": "", "values": {"busbw_gbps": 10.0}}
    return {"measured": [{**row, **more}]}
