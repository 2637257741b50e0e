"""A node that may only be cut off is waited for; what comes meanwhile counts."""

from __future__ import annotations

import asyncio
import time

import pytest
from recovering import Recovering

from srun_wrapper.decide.failure import Failure
from srun_wrapper.recover import recovery
from srun_wrapper.recover.recovery import ENDED, SUPERSEDED


@pytest.mark.parametrize("comes", ["signal", "failure", "nothing"])
def test_what_comes_while_a_lost_node_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    """A cancelled step was requeued, or ended with a code of ours, by the plan of before."""
    monkeypatch.setattr(recovery, "NO_REBOOT", 1.7)

    async def life() -> tuple[object, Recovering]:
        job = Recovering(2)
        state = job.state
        (node,) = state.world.places
        node.last_word = time.monotonic() - 1.2
        state.lose_silent(node, "it does not answer", shared=False)
        handled = asyncio.create_task(job.recovery.handle())
        await asyncio.sleep(0.2)
        assert not handled.done(), "it waits"
        if comes == "signal":
            state.signalled = 15
        elif comes == "failure":
            now = time.monotonic()
            state.failures.append(Failure("crash", now, now, "n0", 1, signal=9))
        state.changed.set()
        return await asyncio.wait_for(handled, 10), job

    end, job = asyncio.run(life())
    outcome = job.incidents[-1].outcome if job.incidents else ""
    if comes == "nothing":
        assert end is not None, "no node can replace it: the job ends"
    else:
        assert end is None
        assert outcome == {"signal": ENDED, "failure": SUPERSEDED}[comes]
