"""Accounts week by week, by local time. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from status.accounts.sums import SHARES, LostTime, Total, lost, since, total
from status.accounts.timeline import JobAccount, ms

MOST_WEEKS = 520


@dataclass(frozen=True)
class Week:
    """A week that begins on Monday at midnight, local time."""

    begin: int  # ms since 1970
    total: Total
    causes: tuple[LostTime, ...]


def weekly(accounts: Sequence[JobAccount]) -> list[Week]:
    """The accounts week by week, the newest first; weeks without a job are left out. Pure."""
    if not accounts:
        return []
    first, last = min(a.begin for a in accounts), max(a.end for a in accounts)
    edges = _mondays(first, last)
    found = []
    for begin, end in pairwise(edges):
        part = [cut for one in accounts if (cut := since(one, begin, end)) is not None]
        if part:
            found.append(Week(begin, total(part), tuple(lost(part, SHARES["cause"]))))
    return found[::-1]


def _mondays(first: int, last: int) -> list[int]:
    """The edges of all weeks that touch [first, last), at most the newest MOST_WEEKS."""
    end = datetime.fromtimestamp(last / 1000)
    monday = datetime(end.year, end.month, end.day) - timedelta(days=end.weekday())
    edges = [ms((monday + timedelta(days=7)).timestamp())]
    while edges[-1] > first and len(edges) <= MOST_WEEKS:
        edges.append(ms(monday.timestamp()))
        monday -= timedelta(days=7)
    return edges[::-1]


def day(at: int) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(at / 1000))
