"""The closer look after the early one: what it adds, and nobody waits for it."""

from __future__ import annotations

import asyncio
import time

import pytest
from test_hang_locating import Watched
from waiting import idle

from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.detect import hang_watch
from srun_wrapper.detect.hang_watch import WINDOW
from srun_wrapper.locate.recorded import Recorded, RecordedCall, RecordedGroup
from srun_wrapper.protocol.closer_messages import LookCloser, LookedCloser
from srun_wrapper.protocol.messages import Inspected, SlotActivity

MISSING = "flight recorder: rank 3 has not entered all_reduce #7 of group 0; the other 5 have"


def recorded(rank: int, number: int, waited: float, items: int = 8) -> Recorded:
    call = RecordedCall(number, "nccl:all_reduce", items, str(items), "Float", waited)
    return Recorded(rank, (RecordedGroup("0", "nccl", "", number, (call,)),))


class Closely(Watched):
    """The same job; its slots answer a closer look, too."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
        self.hang._tell_closer = lambda lines, news: self.said.append((tuple(lines), tuple(news)))

    def closer(self, node: int) -> list[LookCloser]:
        return [order for order in self.job.lines[node].sent if isinstance(order, LookCloser)]

    def early_and_closer(self, stuck: int = 3, odd: Recorded | None = None) -> None:
        """``odd``: the recorder of rank 3, if it differs by more than a missing call."""

        async def scene() -> None:
            self.hang.look(time.monotonic())
            await self.answer(stuck)
            for rank in range(6):
                own = recorded(rank, 6, -1.0) if rank == 3 else recorded(rank, 7, 2.5)
                seen = odd if odd is not None and rank == 3 else own
                token = self.closer(rank // 2)[0].token
                self.job.say(rank // 2, LookedCloser(token, rank % 2, (seen,)))
            await idle()

        asyncio.run(scene())

    def hung(self, stuck: int = -1) -> tuple[str, ...]:
        self.passes(20.0)
        if self.hang._closer is not None:
            self.hang._closer = self.hang._since(), self.hang._closer[1]

        async def scene() -> None:
            self.hang.look(time.monotonic())
            await self.answer(stuck)

        asyncio.run(scene())
        (failure,) = self.job.state.failures
        return failure.evidence


def test_it_reads_all_recorders() -> None:
    w = Closely()
    w.early_and_closer()
    assert [len(w.closer(node)) for node in range(3)] == [1, 1, 1]
    ((lines, news),) = w.said
    assert lines == news and lines[0].startswith(MISSING)
    assert not w.job.state.failures
    evidence = w.hung()
    assert evidence[1].startswith("rank 3 is in no collective")
    assert evidence[3].startswith(MISSING)
    (failure,) = w.job.state.failures
    assert (failure.suspects, failure.node) == ((), "n1")


def test_nobody_stands_out_by_stack_but_one_is_missing() -> None:
    w = Closely()
    w.early_and_closer(stuck=-1)
    assert not w.told
    ((lines, news),) = w.said
    assert lines == news and lines[0].startswith(MISSING)
    assert w.hung()[1:2] == lines
    (failure,) = w.job.state.failures
    assert failure.suspects == (), "a recorder blames no machine"
    assert not failure.mismatch


def test_another_size_is_the_programs_and_no_node_is_suspect() -> None:
    w = Closely()
    w.early_and_closer(odd=recorded(3, 7, 2.5, items=16))
    assert w.told[0][0].nodes == ("n1",), "by its stack alone"
    lines = w.said[0][0]
    assert lines[0].startswith("flight recorder: rank 3 calls all_reduce of 16 (Float), ranks 0-2,")
    assert lines[0].endswith("the program differs by rank (user code); no node is suspect")
    evidence = w.hung(3)
    (failure,) = w.job.state.failures
    assert (failure.suspects, failure.node, failure.rank) == ((), "", None)
    assert failure.mismatch and diagnose([failure]).cause == "user"
    assert lines[0] in evidence
    assert not any("; node: " in line for line in evidence)


def test_all_are_in_it_is_evidence_and_no_news() -> None:
    w = Closely()
    w.early_and_closer(stuck=-1, odd=recorded(3, 7, 2.5))
    ((lines, news),) = w.said
    assert (len(lines), news) == (1, ())
    assert lines[0].startswith("flight recorder: all 6 ranks are in all_reduce #7 of group 0 for ")


def test_an_answer_that_does_not_come_holds_up_nothing() -> None:
    w = Closely()
    w.early()
    assert w.closer(0) and not w.said
    assert w.hung(3)[1].startswith("rank 3 is in no collective")


def test_a_step_meanwhile_makes_it_old() -> None:
    w = Closely()
    w.early_and_closer()
    w.job.state.pace.last += 1.0
    assert w.hang._closer is not None and w.hang._closer[0] != w.hang._since()


def test_it_is_not_repeated_at_every_stall() -> None:
    w = Closely()
    w.early_and_closer()
    w.job.state.pace.last = time.monotonic() - 2.2

    async def scene() -> None:
        w.hang.look(time.monotonic())
        await w.answer()

    asyncio.run(scene())
    assert len(w.told) == 2 and len(w.closer(0)) == 1


def test_a_slip_of_ours_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    def slip(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(hang_watch, "read_recorders", slip)
    w = Closely()
    w.early()
    assert w.told and not w.said
    assert w.hung(3)


@pytest.mark.parametrize("waited", [15.0, 3.0], ids=["for longer than the limit", "not yet"])
def test_ranks_that_spin_in_one_collective_are_a_hang(waited: float) -> None:
    """All but rank 3 use a whole core each, and show no stack."""
    w = Closely()
    w.passes(20.0)

    async def scene() -> None:
        w.hang.look(time.monotonic())
        await asyncio.sleep(0)
        for node in range(3):
            ranks = (2 * node, 2 * node + 1)
            samples = tuple(
                SlotActivity(r % 2, "S", 0.0, 0) if r == 3 else SlotActivity(r % 2, "R", 1.0, 0)
                for r in ranks
            )
            w.job.say(node, Inspected(w.asked()[-1].token, WINDOW, samples))
        await idle()
        for rank in range(6):
            seen = () if rank == 3 else (recorded(rank, 7, waited),)
            w.job.say(rank // 2, LookedCloser(w.closer(rank // 2)[0].token, rank % 2, seen))
        await idle()

    asyncio.run(scene())
    if waited < 10.0:
        assert not w.job.state.failures
        return
    (failure,) = w.job.state.failures
    assert failure.symptom == "hang"
    assert failure.evidence[0].startswith("5 ranks wait in a collective, and no other did anything")
