"""Error counters that nodes tell, as the job records them."""

from __future__ import annotations

import json
from pathlib import Path

from made_job import Job

from robust_slurm.state_dir.ledger import JobLedger
from srun_wrapper.job.reporting.journal import COUNTERS, Journal
from srun_wrapper.protocol.messages import Counted

SYMBOL = "mlx5_0 port 1 symbol_error"


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
