"""Independent tasks (rank_env off): one that is lost counts as killed, and no other is touched."""

from __future__ import annotations

import signal

from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState


def count_as_killed(state: JobState, journal: Journal) -> None:
    """End independent tasks that died with their node or its agent, as under srun."""
    for failure in state.failures:
        ranks = [r for r in state.world.by_rank.values() if r.node.name == failure.node]
        ended = [r for r in ranks if r.exit is None]
        for rank in ended:
            rank.node.silent_as = None  # if it answers again, it is told to end
            state.world.note_exit(rank, 0, int(signal.SIGKILL))
        if ended:
            numbers = ", ".join(str(rank.rank) for rank in ended)
            why = "; ".join(failure.evidence) or failure.tail
            tasks, ends = ("task", "counts") if len(ended) == 1 else ("tasks", "count")
            say(
                f"{why}: {tasks} {numbers} {ends} as killed (exit code 137), the others go on; "
                "with --robust-no-rank-env no task is restarted"
            )
            journal.event("failure", symptom=failure.symptom, evidence=[why])
    state.failures.clear()
