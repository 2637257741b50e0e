"""Error counters that nodes tell, as the job records them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from made_job import Job

from robust_slurm.state_dir.ledger import JobLedger
from srun_wrapper.decide.failure import Failure
from srun_wrapper.job import state
from srun_wrapper.job.reporting.journal import COUNTERS, Journal
from srun_wrapper.protocol.messages import Counted, Stopped

SYMBOL = "mlx5_0 port 1 symbol_error"


@pytest.mark.parametrize("then", ["counted", "a failure", "a signal", "nothing"])
def test_an_incident_waits_for_counters_that_are_being_read(
    then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "READING", 0.2 if then == "nothing" else 10.0)
    job = Job(active=2, spares=0)
    job.say(0, Stopped(1, 1, 0, reading=True))
    job.say(1, Stopped(1, 1, 0))

    async def wait() -> None:
        waiting = asyncio.create_task(job.state.counters_read())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        job.say(0, Counted(2, {SYMBOL: 1}, reading=True))  # the host's; its GPUs' are to come
        await asyncio.sleep(0.05)
        assert not waiting.done()
        if then == "counted":
            job.say(0, Counted(3, {SYMBOL: 1}))
        elif then == "a failure":
            job.state.failures.append(Failure("hang", 1.0, 0.0, "n1"))
        elif then == "a signal":
            job.state.signalled = 15
        job.state.changed.set()
        await asyncio.wait_for(waiting, 5.0)

    asyncio.run(wait())


def test_a_message_is_one_event_and_a_job_records_a_hundred(tmp_path: Path) -> None:
    job = Job(active=1, spares=0)
    ledger = JobLedger(tmp_path)
    job.state.on_counters = Journal(ledger, verbose=False).counters
    job.say(0, Counted(1, {SYMBOL: 4, "eth0 rx_errors": 9}))
    job.say(0, Counted(2, {SYMBOL: 4, "eth0 rx_errors": 9}))  # nothing new
    for n in range(3, 2 * COUNTERS):
        job.say(0, Counted(n, {SYMBOL: 4, "eth0 rx_errors": 9 + n}))
    ledger.close(10.0)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert len(events) == COUNTERS
    assert {key: events[0][key] for key in ("event", "node", "grown")} == {
        "event": "counters",
        "node": "n0",
        "grown": [
            f"{SYMBOL} +4 since robust-task began there",
            "eth0 rx_errors +9 since robust-task began there",
        ],
    }
    last = 9 + 2 * COUNTERS - 1
    assert job.state.show_counters(()) == (  # the incident goes on
        f"n0: {SYMBOL} +4 since robust-task began there",
        f"n0: eth0 rx_errors +{last} since robust-task began there",
    )
