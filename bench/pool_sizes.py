"""ByteRobust's pool sizes beside ours: ``python -m bench.pool_sizes``.

Exit 0; 1 if ours are not the paper's at the rate that explains its table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from robust_slurm.command_line.screen import console, plain_table
from standby.size.count import LossSource, losses, pool


class PaperSetting(NamedTuple):
    """One row of ByteRobust's table 5: machines, the training on them, its P99 pool.

    ``standbys`` is None where the paper has no such row.
    """

    machines: int
    training: str
    standbys: int | None


class FailureRate(NamedTuple):
    """A failure rate in failures per 1,000 node-days."""

    name: str
    per_1000: float


class PaperRow(NamedTuple):
    """A setting, and our pool size at each of RATES."""

    setting: PaperSetting
    standbys: tuple[int, ...]

    @property
    def agrees(self) -> bool:
        """True if our size at the paper's rate is the paper's (or it gives none)."""
        return self.setting.standbys in (None, self.standbys[0])


# ByteRobust (arXiv 2509.16293), table 5.
SETTINGS = (
    PaperSetting(128, "70B, TP 8, DP 32, PP 8", 2),
    PaperSetting(256, "70B, TP 8, DP 64, PP 8", 2),
    PaperSetting(512, "256B, TP 8, DP 64, PP 16", 3),
    PaperSetting(1024, "256B, TP 8, DP 128, PP 16", 4),
    PaperSetting(2048, "", None),
)
# ByteRobust names no rate: 1.2 is the one that explains all four of its sizes (1.165 to 1.25
# do). Llama 3: 419 unexpected interruptions of 2,048 nodes in 54 days (arXiv 2407.21783).
# RSC-1 and RSC-2: Meta's research clusters (arXiv 2410.21680).
RATES = (
    FailureRate("ByteRobust", 1.2),
    FailureRate("RSC-2", 2.34),
    FailureRate("Llama 3", 3.79),
    FailureRate("RSC-1", 6.5),
)


def rows() -> list[PaperRow]:
    """Return every setting at every rate, by the paper's rule: single nodes, one day, 0.99."""
    return [
        PaperRow(
            setting,
            tuple(
                pool(losses(setting.machines, [LossSource(1, rate.per_1000 / 1000)]))
                for rate in RATES
            ),
        )
        for setting in SETTINGS
    ]


def print_table(rows: Sequence[PaperRow], out: Console) -> None:
    """Print ByteRobust's sizes beside ours."""
    headings = [f"{rate.name} {rate.per_1000:g}" for rate in RATES]
    table = plain_table("MACHINES", "TRAINING", "PAPER", *headings, texts=2)
    for row in rows:
        setting = row.setting
        theirs = "" if setting.standbys is None else str(setting.standbys)
        style = "" if row.agrees else "bold red"
        first, *others = map(str, row.standbys)
        table.add_row(
            str(setting.machines), setting.training, theirs, Text(first, style=style), *others
        )
    out.print("standbys by P(K <= n) >= 0.99, K ~ Binomial(machines, p), a window of one day")
    out.print("p: failures per 1,000 node-days, behind the name of the fleet that had so many")
    out.print()
    out.print(table)
    out.print()
    good = all(row.agrees for row in rows)
    said = "ours are the paper's" if good else "OURS ARE NOT THE PAPER'S"
    out.print(Text(f"At the rate that explains ByteRobust's table 5, {said}.", style="bold"))


def main() -> int:
    found = rows()
    print_table(found, console(sys.stdout))
    return 0 if all(row.agrees for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
