"""The heartbeats of one node's ranks, read from their records."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from robust_slurm.record import BeatReader, scan
from srun_wrapper.protocol.messages import RankBeat


class NodeBeats:
    """Reads the records of one epoch; new ones (torchrun's ranks) are found as they appear."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._epoch = 0
        self._readers: dict[int, BeatReader] = {}

    def begin(self, epoch: int) -> None:
        """Read this epoch's records from now on; remove all files of epochs long over.

        A list of a rank's modules is 100 KB with torch, and these files are in the job's memory.
        """
        self._epoch = epoch
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        for path in self._run_dir.iterdir():
            if _over(path.name, epoch):
                with contextlib.suppress(OSError):  # a file that stays must not stop the start
                    path.unlink()

    def forget(self, local: int) -> None:
        """Open a rank's record anew: its slot may have made another file of it."""
        reader = self._readers.pop(local, None)
        if reader is not None:
            reader.close()

    def read(self) -> tuple[RankBeat, ...]:
        """The newest beat of every rank that has a record; ages as of now."""
        for local, path in scan(str(self._run_dir), self._epoch).items():
            if local not in self._readers:
                try:
                    self._readers[local] = BeatReader(path)
                except OSError:  # no file descriptor is left: again next time
                    continue
        beats = []
        now = time.monotonic()
        for local, reader in self._readers.items():
            beat = reader.read()
            if beat is None:
                continue
            beats.append(
                RankBeat(
                    local,
                    beat.step,
                    beat.beats,
                    max(0.0, now - beat.t_mono) if beat.beats else 0.0,
                    beat.phase,
                    max(0.0, now - beat.phase_since) if beat.phase else 0.0,
                    beat.source or "",
                    beat.loss,
                    beat.grad_norm,
                    beat.nan,
                    reader.ended(),
                    beat.proven,
                    beat.sound,
                    beat.healed,
                )
            )
        return tuple(beats)


def _over(name: str, epoch: int) -> bool:
    """True for a file of an epoch long over, and for the answers of a process that has ended."""
    first, _, rest = name.partition("-")
    if first == "stacks":
        pid = rest.partition("-")[0]
        return pid.isdecimal() and not Path(f"/proc/{pid}").exists()
    return first.isdecimal() and int(first) < epoch - 1 and "." in rest
