"""A rank's stdout and stderr: what it writes into, and what carries that on to srun's places."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from robust_slurm.record import RecordWriter
from srun_wrapper.agent.streams.pump import Pump, StepPattern
from srun_wrapper.agent.streams.sinks import open_sinks
from srun_wrapper.protocol.task_options import OutputPlan


class Streams:
    """Opened at once; at the end of the ``with`` only the rank has the writing ends."""

    def __init__(
        self, plan: OutputPlan, rank: int, env: Mapping[str, str], record: str, regex: str, *,
        truncate: bool,
    ) -> None:  # fmt: skip
        """``regex``: how steps look in its output, see StepPattern. Raises OSError, ValueError."""
        sinks = open_sinks(plan, rank, env, truncate=truncate)
        watch = StepPattern(regex, RecordWriter(record).beat) if regex else None
        self._ends: list[int] = []
        self.pumps: list[Pump] = []
        """The pump of stderr comes first."""
        self.err = self._pipe()
        self.pumps.append(Pump(self._source, sinks.err, transform=sinks.label_err, watch=watch))
        self.out = 1
        """srun's own where nothing is to be seen or changed."""
        if not sinks.direct or watch is not None:
            self.out = self._pipe()
            self.pumps.append(Pump(self._source, sinks.out, transform=sinks.label_out, watch=watch))

    def _pipe(self) -> int:
        self._source, end = os.pipe()
        self._ends.append(end)
        return end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for end in self._ends:
            os.close(end)
