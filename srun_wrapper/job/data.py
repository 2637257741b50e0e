"""The data side of the job: which ranks wait for data, and what the nodes' data processes do.

Waits are sampled: a rank that is in the phase ``data wait`` when its node reports is taken to have
waited since the report before. Of the processes only the newest figures of each node are kept.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Mapping
from typing import Any

from robust_slurm.layout import DATA_WAIT
from srun_wrapper.job.model import Node, Role, World
from srun_wrapper.protocol.data_messages import DataReport, SourceFigures, report_from
from srun_wrapper.protocol.messages import Report

WINDOW = 60.0  # s for which waits are shown
LONGEST = 5.0  # s, at the most, that count as waited between two reports of a node
RANKS = 1024  # of a node, at most
SHOWN = 20  # ranks and nodes by name
SOURCES = 50  # by name
RATED = 64  # nodes whose rates are averaged: all nodes make the same steps
SHORT = 1.0  # s of the window; a rank that waited less does not count as waiting

Where = tuple[Node, int]  # and the rank's local id


class JobData:
    """Collects the data figures of all reports. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._reported: dict[Node, float] = {}
        self._news: dict[Node, DataReport] = {}
        self._waited: dict[Where, float] = {}
        self._before: dict[Where, float] = {}  # in the whole window before this one
        self._since = self._begun = time.monotonic()

    def new_epoch(self, now: float) -> None:
        """Forget the ranks' waits; the data processes stay."""
        self._reported.clear()
        self._waited, self._before = {}, {}
        self._since = self._begun = now

    def hear(self, node: Node, report: Report, now: float) -> None:
        """Take in the report of a node."""
        if (news := report_from(report.data)) is not None:
            self._news[node] = news
        gap = min(LONGEST, now - self._reported.get(node, now))
        self._reported[node] = now
        if now - self._since >= WINDOW:
            self._before = self._waited if now - self._since < 2 * WINDOW else {}
            self._waited, self._since = {}, now
        for beat in report.beats:
            started = beat.beats > 0  # the first batch always takes a while
            if started and beat.phase == DATA_WAIT and 0 <= beat.local < RANKS:
                at = node, beat.local
                self._waited[at] = self._waited.get(at, 0.0) + gap

    def record(
        self, world: World, phases: Iterable[tuple[str, float]], now: float
    ) -> dict[str, Any] | None:
        """Return what robust-status shows (``state_dir/data_record.py``); None: the job has no
        data process, and no rank waits for data. ``phases``: that ranks are in, and since when."""
        nodes = [node for node in world.places if node.role is Role.ACTIVE]
        self._news = {node: self._news[node] for node in nodes if node in self._news}
        waited, window = self._last_window(now)
        waiting = [since for name, since in phases if name == DATA_WAIT]
        if not self._news and not waited and not waiting:
            return None
        ranks = max(1, world.size, len(world.inner))
        most = heapq.nlargest(SHOWN, waited.items(), key=lambda item: item[1])
        return {
            **_processes(self._news),
            "window_s": round(window, 1),
            "waiting_ranks": len(waiting),
            "waiting_s": round(now - min(waiting), 1) if waiting else 0.0,
            "waited_ranks": len(waited),
            "ranks": ranks,
            "waited_s": round(sum(waited.values()) / ranks, 2),
            "most_waited": [_rank(world, at, seconds) for at, seconds in most],
        }

    def _last_window(self, now: float) -> tuple[dict[Where, float], float]:
        """Return about how long each rank has waited, and the length of the window."""
        part = min(1.0, (now - self._since) / WINDOW)
        found = dict(self._waited)
        for at, seconds in self._before.items() if part < 1.0 else ():
            found[at] = found.get(at, 0.0) + seconds * (1.0 - part)
        window = min(WINDOW, now - self._begun)
        found = {at: min(seconds, window) for at, seconds in found.items() if seconds >= SHORT}
        return found, window


def _rank(world: World, at: Where, seconds: float) -> dict[str, Any]:
    node, local = at
    place = world.place_of(node)
    slots = world.ranks[place] if place is not None else ()
    inner = place is not None and (place, local) in world.inner
    rank = slots[local] if local < len(slots) and not inner else None
    return {"rank": rank, "local": local, "node": node.name, "seconds": round(seconds, 1)}


def _processes(news: Mapping[Node, DataReport]) -> dict[str, Any]:
    off = [f"{node.name}: {report.off}" for node, report in news.items() if report.off]
    running = [report.figures for report in news.values() if report.figures is not None]
    running_ahead = [figures.ahead for figures in running]
    fullest = max(running, key=lambda figures: figures.held, default=None)
    sources = _sources(news)
    return {
        "nodes": len(news),
        "processes": len(running),
        "off_nodes": len(off),
        "off": off[:SHOWN],
        "deaths": sum(report.deaths for report in news.values()),
        "ahead_least": min(running_ahead, default=None),
        "ahead": round(sum(running_ahead) / len(running), 1) if running else None,
        "most_ahead": max((figures.most_ahead for figures in running), default=None),
        "held_bytes": fullest.held if fullest is not None else None,
        "memory_bytes": fullest.memory if fullest is not None else None,
        "sources": sources[:SOURCES],
        "other_sources": max([len(sources) - SOURCES, 0, *(figures.others for figures in running)]),
    }


def _sources(news: Mapping[Node, DataReport]) -> list[dict[str, Any]]:
    """Return the sources, those that are waited for first.

    All nodes make the same steps, so rates are averaged. Numbers of records are added up, as of the
    lanes that nodes share each is read on one of them; where each node reads all, one stands for
    all.
    """
    rates: dict[str, list[SourceFigures]] = {}
    waits: dict[str, tuple[float, float]] = {}
    shared: dict[str, tuple[int, int]] = {}
    whole: dict[str, tuple[int, int]] = {}
    running = [report.figures for report in news.values() if report.figures is not None]
    for number, figures in enumerate(running):
        for source in figures.sources:
            name = source.name
            if number < RATED:
                rates.setdefault(name, []).append(source)
            if source.waited_s or source.silent_s:
                waited, silent = waits.get(name, (0.0, 0.0))
                waits[name] = max(waited, source.waited_s), max(silent, source.silent_s)
            if figures.all_here:
                read, bad = whole.get(name, (0, 0))
                whole[name] = max(read, source.read), max(bad, source.bad)
            elif source.read:
                read, bad = shared.get(name, (0, 0))
                shared[name] = read + source.read, bad + source.bad
    found: list[dict[str, Any]] = []
    for name in {**rates, **waits, **shared, **whole}:
        rated = rates.get(name, [])
        waited, silent = waits.get(name, (0.0, 0.0))
        counts = max(shared.get(name, (0, 0)), whole.get(name, (0, 0)))
        found.append(
            {
                "name": name,
                "tokens_s": _mean([source.tokens_s for source in rated]),
                "samples_s": _mean([source.samples_s for source in rated]),
                "waited_s": waited,
                "silent_s": silent,
                "read": counts[0],
                "skipped": counts[1],
            }
        )
    found.sort(key=lambda row: (row["name"] == "", -row["silent_s"], -row["waited_s"], row["name"]))
    return found


def _mean(values: list[float]) -> float:
    return float(f"{sum(values) / len(values):.4g}") if values else 0.0
