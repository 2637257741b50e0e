"""The beginning of an epoch."""

from __future__ import annotations

import signal

from checkpointed_job import CheckpointedJob
from made_job import made_launch

from srun_wrapper.job.facts import JobFacts
from srun_wrapper.protocol.messages import Signal, Start
from srun_wrapper.supervisor.epoch import Begun, Epochs


def test_all_places_start_and_get_the_signals_that_waited() -> None:
    """The listeners are called once that is done, in their order."""
    job = CheckpointedJob()
    epochs = Epochs(job.state, JobFacts(made_launch("train"), 12, b""), job.restoring)
    told: list[tuple[str, int, Begun]] = []
    for name in ("first", "second"):
        epochs.listeners.append(lambda begun, n=name: told.append((n, len(job.sent), begun)))
    job.state.members.stop_epoch()
    job.state.pass_on(signal.SIGUSR1)
    job.sent.clear()
    epochs.start("crash: rank 1")
    names = ["n0", "n1", "n2", "n3"]
    assert [(name, type(order)) for name, order in job.sent[:4]] == [(n, Start) for n in names]
    assert job.sent[4:] == [(n, Signal(signal.SIGUSR1, early=True)) for n in names]
    begun = Begun("crash: rank 1", 0, from_memory=False)
    assert told == [("first", 8, begun), ("second", 8, begun)]
    assert job.state.world.epoch == 2 and not job.state.early and not job.state.stopped()
    job.sent.clear()
    epochs.start("")
    assert len(job.sent) == 4  # a signal is sent once
