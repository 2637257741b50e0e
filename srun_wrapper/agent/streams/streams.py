"""A rank's stdout and stderr: what it writes into, and what carries that on to srun's places."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack

from robust_slurm.record import RecordWriter
from srun_wrapper.agent.streams.pump import Pump, StepPattern
from srun_wrapper.agent.streams.sinks import open_sinks
from srun_wrapper.protocol.task_options import OutputPlan


class Streams(ExitStack):
    """Opened at once; at the end of the ``with`` only the rank has the writing ends."""

    def __init__(
        self, plan: OutputPlan, rank: int, env: Mapping[str, str], record: str, regex: str, *,
        truncate: bool,
    ) -> None:  # fmt: skip
        """``regex``: how steps look in its output, see StepPattern. Raises OSError, ValueError."""
        super().__init__()
        sinks = open_sinks(plan, rank, env, truncate=truncate)
        watch = StepPattern(regex, RecordWriter(record).beat) if regex else None
        self.pumps: list[Pump] = []
        """The pump of stderr comes first."""
        self.err = self._pipe()
        self.pumps.append(
            Pump(
                self._source, sinks.err, transform=sinks.label_err, watch=watch,
                name=f"stderr of rank {rank}",
            )
        )  # fmt: skip
        self.out = 1
        """srun's own where nothing is to be seen or changed."""
        if not sinks.direct or watch is not None:
            self.out = self._pipe()
            self.pumps.append(
                Pump(
                    self._source, sinks.out, transform=sinks.label_out, watch=watch,
                    name=f"stdout of rank {rank}",
                )
            )  # fmt: skip

    def _pipe(self) -> int:
        self._source, end = os.pipe()
        self.callback(os.close, end)
        return end
