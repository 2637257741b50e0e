"""The data side of a job in a few lines: who waits for data and for which source. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from robust_slurm.state_dir.data_record import DataRecord, DataSource, RankWait
from robust_slurm.text import counted

NAMED = 3  # sources in a line
SLOW = 0.2  # share of the time that ranks wait, from which on a job needs attention
LONG = 30.0  # s that a rank waits, likewise
LEAST = 10.0  # s that waits must have been looked at
SHORT = 1.0  # s; shorter waits are not shown
SILENT = 5.0  # s; a source that has given nothing for less is not called silent


def data_lines(data: DataRecord, step: str) -> list[str]:
    """Return at most three lines: waits and trouble with data processes only if there are any."""
    lines = []
    if told := waits(data):
        lines.append(f"data waits of step {step}: {told}")
    if data.processes:
        parts = filter(None, [_ahead(data), _rates(data.sources), _skipped(data.sources)])
        lines.append(f"data of step {step}: {'; '.join(parts)}")
    if told := _processes(data):
        lines.append(f"data processes of step {step}: {told}")
    return lines


def slowed(data: DataRecord | None) -> bool:
    """Return whether the job needs attention, as its ranks wait for data."""
    if data is None:
        return False
    often = data.window_s >= LEAST and data.waited_s >= SLOW * data.window_s
    return often or (data.waiting_ranks > 0 and data.waiting_s >= LONG)


def waits(data: DataRecord) -> str:
    """Return how long ranks have waited for data, and for what; "" if they have not."""
    parts = []
    if data.waiting_ranks and data.waiting_s >= SHORT:
        parts.append(
            f"{data.waiting_ranks} of {counted(data.ranks, 'rank')} now wait for data, "
            f"the longest for {data.waiting_s:.0f} s"
        )
    if data.waited_ranks:
        most = f", {_rank(data.most_waited[0])} most: {_most(data)}" if data.most_waited else ""
        parts.append(
            f"ranks waited {data.waited_s:.0f} of the last {data.window_s:.0f} s on average{most}"
        )
    return "; ".join([*parts, *filter(None, [_reason(data)])]) if parts else ""


def _most(data: DataRecord) -> str:
    return f"{data.most_waited[0].seconds:.0f} s"


def _rank(wait: RankWait) -> str:
    name = f"rank {wait.rank}" if wait.rank is not None else f"local rank {wait.local}"
    return f"{name} on {wait.node}"


def _reason(data: DataRecord) -> str:
    """Return which source the job waits for, or that no source is slow."""
    named = [source for source in data.sources if source.name]
    silent = max(named, key=lambda source: source.silent_s, default=None)
    if silent is not None and silent.silent_s >= SILENT:
        return f"source {silent.name} has given nothing for {silent.silent_s:.0f} s"
    slow = max(named, key=lambda source: source.waited_s, default=None)
    if slow is not None and slow.waited_s >= SHORT:
        return f"the data process waited {slow.waited_s:.0f} s for source {slow.name}"
    if data.processes and data.window_s >= LEAST:
        return "no source is slow: the data process takes long to make steps"
    return ""


def _ahead(data: DataRecord) -> str:
    if data.ahead is None or data.ahead_least is None or not data.most_ahead:
        return ""
    said = f"{data.ahead:g} of {data.most_ahead} steps ahead"
    if data.ahead_least < data.ahead:
        said += f" on average, {data.ahead_least} on the node with fewest"
    return said


def _rates(sources: Sequence[DataSource]) -> str:
    """Like "1.2 M tokens/s (web 960 k, code 240 k)"."""
    ranked = sorted(sources, key=lambda source: (source.name == "", -source.tokens_s))
    shown = [f"{source.name} {_big(source.tokens_s)}" for source in ranked[:NAMED] if source.name]
    more = [f"{len(ranked) - NAMED} more"] if len(ranked) > NAMED else []
    by = f" ({', '.join([*shown, *more])})" if len(ranked) > 1 else ""
    return f"{_big(sum(source.tokens_s for source in sources))} tokens/s{by}"


def _skipped(sources: Sequence[DataSource]) -> str:
    ranked = sorted((s for s in sources if s.skipped), key=lambda source: -source.skipped)
    if not ranked:
        return ""
    total = counted(sum(source.skipped for source in ranked), "bad record")
    shown = [f"{source.name or 'others'} {source.skipped}" for source in ranked[:NAMED]]
    more = [f"{len(ranked) - NAMED} more"] if len(ranked) > NAMED else []
    return f"{total} skipped ({', '.join([*shown, *more])})"


def _processes(data: DataRecord) -> str:
    parts = []
    if data.off_nodes:
        why = f" ({data.off[0]})" if data.off else ""
        parts.append(f"off on {data.off_nodes} of {counted(data.nodes, 'node')}{why}")
    if (absent := data.nodes - data.processes - data.off_nodes) > 0:
        parts.append(f"no word from {absent} of {counted(data.nodes, 'node')}")
    if data.deaths:
        parts.append(f"died {counted(data.deaths, 'time')} so far")
    return "; ".join(parts)


def _big(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"
