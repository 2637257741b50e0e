"""Workers that come, do not come, come twice, die, are late or talk nonsense; and strangers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fake_test_worker import DIE, SILENT, connect, fleet, introduce, passed

from health.active.coordinator.session import TestSession, WorkerError
from robust_slurm.frames import framed

GEMM = {"test": "gemm", "level": "quick", "seconds": 1.0, "seed": 0}


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 60))


async def opened(**expected: int) -> TestSession:
    session = TestSession(expected)
    await session.open("127.0.0.1")
    return session


def test_a_worker_is_asked_and_answers() -> None:
    async def body() -> None:
        asked: list[dict[str, Any]] = []

        def answer(task: dict[str, Any]) -> Any:
            asked.append(task)
            return passed(task, values={"fp32_tflops": 2.5}, node="somebody else")

        async with fleet({"n1": answer}) as session:
            assert session.ready("n1") == (0,) and session.missing("n1") == ()
            assert session.about("n1").host == "127.0.0.1" and session.idle("n1")
            (got,) = await session.ask("n1", GEMM, 5)
            assert (got.test, got.node, got.values) == ("gemm", "n1", {"fp32_tflops": 2.5})
            assert asked[0]["id"] > 0 and asked[0].items() >= GEMM.items()

    run(body())


def test_tasks_of_one_worker_come_one_after_the_other() -> None:
    async def body() -> None:
        async with fleet({"n1": passed}) as session:
            got = await asyncio.gather(*(session.ask("n1", GEMM, 5) for _ in range(5)))
            assert [one.error for (one,) in got] == [""] * 5

    run(body())


def test_every_slot_of_a_node_is_a_worker() -> None:
    async def body() -> None:
        async with fleet({"n1": passed}, slots=3) as session:
            assert session.ready("n1") == (0, 1, 2)
            for local in range(3):
                assert not (await session.ask("n1", GEMM, 5, local))[0].error

    run(body())


def test_gather_ends_at_its_time_and_says_who_is_missing() -> None:
    async def body() -> None:
        session = await opened(n1=1, n2=1, n3=1)
        one = await introduce(session.worker_env("127.0.0.1", "n1"))
        slow = await connect(session.worker_env("127.0.0.1", "n3"))
        slow.say({"hello": {"node": "n3", "local": 0, "pid": 1}})
        await session.gather(0.3)
        assert session.ready("n1") == (0,) and session.ready("n2") == ()
        assert "n2 did not connect within 0.3 s" in session.missing("n2")[0]
        assert "n3 connected, but did not import torch" in session.missing("n3")[0]
        (got,) = await session.ask("n2", GEMM, 1)
        assert "did not connect" in got.error
        await session.close()
        assert await one.hear() == {"quit": True}

    run(body())


def test_gather_does_not_wait_for_what_is_lost_or_unable() -> None:
    async def body() -> None:
        session = await opened(n1=1, n2=1)
        env = session.worker_env("127.0.0.1", "n2")
        gathered = asyncio.create_task(session.gather(30))
        session.lost("n1", "srun: n1 is down")
        unable = await connect(env)
        unable.say({"hello": {"node": "n2", "local": 0, "pid": 1}})
        unable.say({"unable": "torch cannot be imported: no such module; install it"})
        await gathered
        assert session.missing("n1") == ("srun: n1 is down",)
        assert session.missing("n2") == (
            "the worker on n2 cannot test: torch cannot be imported: no such module; install it",
        )
        unable.writer.close()
        await session.close()
        assert "cannot test" in session.missing("n2")[0]  # what came later changes nothing

    run(body())


def test_the_second_worker_for_a_place_is_sent_away() -> None:
    async def body() -> None:
        async with fleet({"n1": passed}) as session:
            for node in ("n1", "n9"):
                second = await introduce(session.worker_env("127.0.0.1", node))
                assert await second.hear() == {"quit": True}
                assert await second.hear() is None
            assert not (await session.ask("n1", GEMM, 5))[0].error

    run(body())


def test_a_worker_that_dies_amid_a_task() -> None:
    async def body() -> None:
        async with fleet({"n3": lambda task: DIE}) as session:
            (got,) = await session.ask("n3", GEMM, 30)
            assert got.error == "the worker on n3 ended during gemm" and got.node == "n3"
            (got,) = await session.ask("n3", {**GEMM, "test": "memory"}, 30)
            assert got.error == "the worker on n3 ended during gemm"
            assert session.ready("n3") == () and not session.idle("n3")
            with pytest.raises(WorkerError):
                await session.request("n3", {"test": "listen"}, 1)

    run(body())


def test_a_late_answer_is_dropped_and_the_next_task_waits_for_it() -> None:
    async def body() -> None:
        session = await opened(n1=1)
        said = await introduce(session.worker_env("127.0.0.1", "n1"))
        await session.gather(5)
        (got,) = await session.ask("n1", GEMM, 0.1)
        assert got.error == "the worker on n1 did not answer gemm within 0.1 s"
        assert not session.idle("n1") and session.ready("n1") == (0,)
        (got,) = await session.ask("n1", {**GEMM, "test": "memory"}, 0.1)
        assert got.error.endswith("memory within 0.1 s: it is still busy with gemm")
        waiting = asyncio.create_task(session.ask("n1", {**GEMM, "test": "memory"}, 5))
        first = await said.hear()
        assert first and first["test"] == "gemm"
        said.say({"id": first["id"], **passed(first, values={"late": 1.0})})
        second = await said.hear()
        assert second and second["test"] == "memory"
        said.say({"id": first["id"], **passed(first, values={"late": 1.0})})
        said.say({"id": second["id"], **passed(second, values={"right": 1.0})})
        assert (await waiting)[0].values == {"right": 1.0}
        await session.close()

    run(body())


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"measured": []}, "it holds none"),
        ({"measured": "gemm"}, "it holds none"),
        ({}, "it holds none"),
        ({"measured": [{"test": "gemm", "colour": 1}]}, "not a measurement"),
        ({"measured": [{"values": {"x": "fast"}}]}, "fast"),
        ({"measured": [{"values": {"x": None}}]}, "float"),
        ({"measured": [{"values": {"x": 10**400}}]}, "too large"),
        ({"measured": [{"values": {"x": float("nan")}}]}, "not finite"),
        ({"measured": [{"wrong": 3}]}, "not iterable"),
        (b"no json", "invalid message"),
        (b"[1, 2]", "not a JSON object"),
        (b"[" * 60_000, "invalid message"),
    ],
)
def test_nonsense_is_an_error_of_that_test(answer: Any, said: str) -> None:
    async def body() -> None:
        async with fleet({"n1": lambda task: answer}) as session:
            (got,) = await session.ask("n1", GEMM, 5)
            assert said in got.error and "n1" in got.error and got.test == "gemm"

    run(body())


@pytest.mark.parametrize(
    "hello",
    [{"hello": {"node": ["n1"]}}, {"hello": "n1"}, {"hello": {"node": "n1", "local": "0"}}, {}],
)
def test_a_hello_that_is_none_takes_no_place(hello: dict[str, Any]) -> None:
    async def body() -> None:
        session = await opened(n1=1)
        said = await connect(session.worker_env("127.0.0.1", "n1"))
        said.say(hello)
        assert await said.hear() == {"quit": True}
        good = await introduce(session.worker_env("127.0.0.1", "n1"))
        await session.gather(5)
        assert session.ready("n1") == (0,)
        good.writer.close()
        await session.close()

    run(body())


def test_strangers_are_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        monkeypatch.setattr(framed, "INTRODUCTION", 0.2)
        session = await opened(n1=1)
        env = session.worker_env("127.0.0.1", "n1")
        other = await connect(env, key=b"k" * 32)
        other.say({"hello": {"node": "n1", "local": 0, "pid": 1}})
        assert await other.hear() is None
        mute = await connect(env)
        assert await mute.hear() is None
        reader, writer = await asyncio.open_connection("127.0.0.1", session.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.readexactly(21)
        assert await reader.read() == b""
        writer.close()
        assert "did not connect" in session.missing("n1")[0]
        await session.close()

    run(body())


def test_close_ends_also_those_that_do_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        monkeypatch.setattr("health.active.coordinator.session.GOODBYE_S", 0.1)
        session = await opened(n1=1)
        said = await introduce(session.worker_env("127.0.0.1", "n1"))
        await session.gather(5)
        asked = asyncio.create_task(session.ask("n1", GEMM, 30))
        assert (await said.hear() or {})["test"] == "gemm"
        await session.close()
        assert (await asked)[0].error == "the worker on n1 was asked to exit"
        assert await said.hear() == {"quit": True} and await said.hear() is None

    run(body())


def test_a_worker_of_a_lost_node_keeps_its_connection() -> None:
    async def body() -> None:
        async with fleet({"n1": passed}) as session:
            session.lost("n1", "srun says so")
            assert not (await session.ask("n1", GEMM, 5))[0].error

    run(body())


def test_the_key_is_in_no_text() -> None:
    async def body() -> None:
        answers: dict[str, Callable[[dict[str, Any]], Any]] = {"n1": lambda t: SILENT, "n2": passed}
        async with fleet(answers) as session:
            (got,) = await session.ask("n1", GEMM, 0.05)
            shown = json.dumps([got.as_dict(), session.missing("n1"), repr(session)])
            assert session.key.hex() not in shown and len(session.key) == 32

    run(body())
