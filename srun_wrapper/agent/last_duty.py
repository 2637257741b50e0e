"""The last thing that an agent does for the job when the supervisor is gone for good."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path

from robust_slurm.state_dir.ledger import append_line
from srun_wrapper.agent.connections.silence import SilenceVerdict
from srun_wrapper.agent.place import Place, job_of
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.protocol.messages import Start
from srun_wrapper.protocol.task_options import TaskOptions


def last_duty(
    place: Place, key: bytes, options: TaskOptions, verdict: SilenceVerdict, start: Start | None
) -> None:
    """Bring the job back or release the node. In a thread: Slurm may take seconds to answer."""
    process_tree.spared_thread = str(threading.get_native_id())  # it starts Slurm's commands
    from srun_wrapper.agent import (
        batch_host_failover,  # not needed by the thousands of shims that never do this
    )

    job_dir = Path(options.records) if options.records else None

    def report(text: str) -> None:
        _report(place.node, job_dir, text)

    report(f"{verdict.value}: ending the ranks")
    if verdict is SilenceVerdict.HOST_LOST and start is not None and options.requeue:
        batch_host_failover.rescue(place, key, start, job_dir, options, report)
    if place.standby_request:
        of = job_of(place, start) if start is not None else place.job_id
        wait = options.slurm_wait if verdict is SilenceVerdict.HOST_LOST else 0.0
        batch_host_failover.release_standby(place, of, report, wait)


def _report(node: str, job_dir: Path | None, text: str) -> None:
    """Write it down and say it: srun may be gone, and stderr with it."""
    event = {"time": time.time(), "event": "supervisor_gone", "node": node, "text": text}
    with contextlib.suppress(OSError):
        if job_dir is not None:
            append_line(job_dir / "events.jsonl", event)
    with contextlib.suppress(OSError):
        sys.stderr.write(f"robust-task: {node}: {text}\n")
        sys.stderr.flush()
