"""The pages of ``robust-status serve``: a path in, a response out. The paths are all named here."""

from __future__ import annotations

import io
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from robust_slurm.command_line import version
from status.metrics.families import Family
from status.metrics.textfile import collect
from status.report.write import ReportError, fill, rendered
from status.show import Cluster, NoRecordError, print_json, read_cluster, read_job
from status.source import RecordSource, ask_slurm
from status.views.overview import duration, node_word

FRESH_S = 5.0  # s for which a page is reused, however often it is requested
MOST_CACHED = 64
NEW_JOBS = 10  # pages of jobs made in FRESH_S; beyond, the copy that is kept is shown, or 503
JOB_WAIT_S = 2.0  # for other jobs' pages that are being made
REFRESH_S = 15  # s after which a browser loads a page anew
_JOB = re.compile(r"/job/([1-9]\d{0,9})", re.ASCII)
HTML = "text/html; charset=utf-8"

T = TypeVar("T")
Encode = Callable[[list[Family], str], tuple[bytes, str]]


@dataclass(frozen=True)
class Response:
    status: int
    kind: str
    body: bytes


class Pages:
    """Makes the pages, and keeps each for FRESH_S, so that visitors cannot overload Slurm.

    Any number of jobs can be asked for: their pages share one look at Slurm, are made one at a time
    and not too many of them, and hold up no other page.
    """

    def __init__(
        self, source: RecordSource, encode: Encode, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._source = source
        self._encode = encode
        self._clock = clock
        self._lock, self._job_lock = threading.Lock(), threading.Lock()
        self._new: deque[float] = deque(maxlen=NEW_JOBS)
        self._keeping = threading.Lock()
        self._made: dict[str, tuple[float, Any]] = {}

    def get(self, path: str, accept: str = "") -> Response:
        """The response to a GET of a path, without a query."""
        if path == "/":
            return self._fresh("/", lambda: _overview(read_cluster(self._source)))
        if path == "/status.json":
            return self._fresh(path, lambda: _json(read_cluster(self._source)))
        if path == "/metrics":
            made = self._fresh("/metrics", lambda: collect(self._source)[0])
            body, kind = self._encode(made, accept)
            return Response(200, kind, body)
        if (match := _JOB.fullmatch(path)) is not None:
            return self._job_page(path, int(match[1]))
        return _plain(404, "no such page: / /job/ID /metrics /status.json")

    def _job_page(self, path: str, number: int) -> Response:
        made: Response | None
        stale: Response | None
        made, stale = self._kept(path)
        if made is not None:
            return made
        with self._keeping:
            now = self._clock()
            enough = len(self._new) == NEW_JOBS and now - self._new[0] < FRESH_S
            if not enough:
                self._new.append(now)
        if enough or not self._job_lock.acquire(timeout=JOB_WAIT_S):
            return stale or _BUSY
        try:
            made = self._kept(path)[0]
            return made or self._keep(path, self._job(number))
        finally:
            self._job_lock.release()

    def _job(self, number: int) -> Response:
        view = self._kept("slurm")[0]
        if view is None:
            view = self._keep("slurm", ask_slurm(self._source.door, with_nodes=False))
        try:
            found = read_job(number, self._source, with_account=True, view=view)
            return Response(200, HTML, rendered(found, REFRESH_S).encode())
        except NoRecordError:
            return _plain(404, f"no record of job {number}")
        except ReportError as error:
            return _plain(503, str(error))

    def _fresh(self, key: str, make: Callable[[], T]) -> T:
        with self._lock:  # one look at Slurm at a time
            made: T | None = self._kept(key)[0]
            return made if made is not None else self._keep(key, make())

    def _kept(self, key: str) -> tuple[Any, Any]:
        """Return what is kept and fresh, or None; and what is kept, however old, or None."""
        with self._keeping:
            when, made = self._made.get(key, (0.0, None))
            fresh = made is not None and self._clock() - when < FRESH_S
            return made if fresh else None, made

    def _keep(self, key: str, value: T) -> T:
        with self._keeping:
            self._made.pop(key, None)
            self._made[key] = (self._clock(), value)
            while len(self._made) > MOST_CACHED:
                del self._made[next(iter(self._made))]
        return value


def _overview(found: Cluster) -> Response:
    rows = found.report.nodes
    words = sorted({(row.pool or "?", node_word(row)) for row in rows})
    pools = [
        (pool, word, sum((r.pool or "?", node_word(r)) == (pool, word) for r in rows))
        for pool, word in words
    ]
    context = {
        "found": found,
        "pools": pools,
        "duration": duration,
        "refresh_s": REFRESH_S,
        "made": f"Made by robust-status {version()} at {time.strftime('%Y-%m-%d %H:%M:%S')}; "
        "this page loads itself anew.",
    }
    try:
        return Response(200, HTML, fill("status.html.j2", context).encode())
    except ReportError as error:
        return _plain(503, str(error))


def _json(found: Cluster) -> Response:
    text = io.StringIO()
    print_json(found.as_json(), text)
    return Response(200, "application/json", text.getvalue().encode())


_BUSY = Response(
    503,
    "text/plain; charset=utf-8",
    f"too many pages of jobs are asked for: load this one again in {FRESH_S:g} s\n".encode(),
)


def _plain(status: int, text: str) -> Response:
    return Response(status, "text/plain; charset=utf-8", f"{text}\n".encode())
