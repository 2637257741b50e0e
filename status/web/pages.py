"""The pages of ``robust-status serve``: a path in, a response out. The paths are all named here."""

from __future__ import annotations

import io
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from robust_slurm.command_line import version
from status.metrics.families import Family
from status.metrics.textfile import collect
from status.report.write import ReportError, fill, rendered
from status.show import Cluster, NoRecordError, print_json, read_cluster, read_job
from status.source import RecordSource
from status.views.overview import duration, node_word

FRESH_S = 5.0  # s for which a page is reused, however often it is requested
MOST_CACHED = 64
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
    """Makes the pages, and keeps each for FRESH_S, so that visitors cannot overload Slurm."""

    def __init__(
        self, source: RecordSource, encode: Encode, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._source = source
        self._encode = encode
        self._clock = clock
        self._lock = threading.Lock()
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
            number = int(match[1])
            return self._fresh(path, lambda: self._job(number))
        return _plain(404, "no such page: / /job/ID /metrics /status.json")

    def _job(self, number: int) -> Response:
        try:
            found = read_job(number, self._source, with_account=True)
            return Response(200, HTML, rendered(found, REFRESH_S).encode())
        except NoRecordError:
            return _plain(404, f"no record of job {number}")
        except ReportError as error:
            return _plain(503, str(error))

    def _fresh(self, key: str, make: Callable[[], T]) -> T:
        with self._lock:  # one look at Slurm at a time
            now = self._clock()
            kept: tuple[float, T] | None = self._made.get(key)
            if kept is not None and now - kept[0] < FRESH_S:
                return kept[1]
            value = make()
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


def _plain(status: int, text: str) -> Response:
    return Response(status, "text/plain; charset=utf-8", f"{text}\n".encode())
