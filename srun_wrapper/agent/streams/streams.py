"""A rank's stdout and stderr: what it writes into, and what carries that on to srun's places."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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
        self.err = self._stream(f"stderr of rank {rank}", sinks.err, sinks.label_err, watch)
        self.out = 1
        """srun's own where nothing is to be seen or changed."""
        if not sinks.direct or watch is not None:
            self.out = self._stream(f"stdout of rank {rank}", sinks.out, sinks.label_out, watch)

    def _stream(
        self,
        name: str,
        sink: int | None,
        label: Callable[[bytes], bytes] | None,
        watch: StepPattern | None,
    ) -> int:
        """Return the end into which the rank writes; a pump carries that on."""
        source, end = os.pipe()
        self.callback(os.close, end)
        self.pumps.append(Pump(source, sink, transform=label, watch=watch, name=name))
        return end
