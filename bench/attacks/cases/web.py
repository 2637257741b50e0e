"""Attacks on the web page of robust-status, and on those who look at it."""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from html.parser import HTMLParser
from threading import Thread
from typing import Any

from bench.attacks.attack import Attack, Got
from bench.attacks.cases.words import _record
from bench.attacks.room import MALLORY, VICTIM, Room
from bench.common import REPOSITORY, BenchError

WITHIN = 2.0
"""s in which the page has to come, on a machine that does other things as well."""
XSS = """<script>alert(1)</script><img src=x onerror=alert(1)>"'><svg/onload=alert(1)>\
</title><a href="javascript:alert(1)">x</a>{{7*7}}"""
_SERVE = """import os, sys
sys.path[:0] = [{repository!r}]
os.environ["ROBUST_SITE_CONFIG"] = {top!r} + "/robust.toml"
from status.cli import main
sys.exit(main(["serve", "--port", "0", "--state-dir", {top!r} + "/state"]))
"""
_SCONTROL = """#!/bin/sh
echo "$0 $*" >>{top}/asked
sleep 0.1
case "$*" in *ping*) echo 'Slurmctld(primary) at x is UP';; esac
"""


class _Page:
    """The page, served as the victim from the room's records."""

    def __init__(self, room: Room) -> None:
        code = _SERVE.format(repository=str(REPOSITORY), top=str(room.top))
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={"PATH": f"{room.top}/bin:/usr/bin:/bin", "HOME": str(room.top)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            user=VICTIM,
            group=VICTIM,
            extra_groups=[],
        )
        assert self._process.stdout is not None
        found = re.match(r"http://127.0.0.1:(\d+)/", self._process.stdout.readline())
        if found is None:
            raise BenchError("the page is not served")
        self.port = int(found[1])
        if self.takes("/", 60) >= 60:
            raise BenchError("the page does not come without an attack either")

    def get(self, path: str, timeout: float = 10.0) -> tuple[int, str]:
        """Return status and body; 0 if none came in time."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            line.request("GET", path, headers={"Host": "localhost"})
            answer = line.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException):
            return 0, ""
        finally:
            line.close()

    def takes(self, path: str, limit: float = 12.0) -> float:
        """Return the seconds until the page came, as often as one must ask."""
        began = time.monotonic()
        while time.monotonic() < began + limit:
            if self.get(path, limit)[0] == 200:
                return time.monotonic() - began
            time.sleep(0.1)
        return limit

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self._process.pid}/task"))  # noqa: PTH208 - names alone

    def connect(self, say: bytes, small: bool = False) -> socket.socket | None:
        """Open a connection and say something; ``small``: take few bytes of an answer."""
        sock = socket.socket()
        sock.settimeout(2)
        with suppress(OSError):
            if small:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.connect(("127.0.0.1", self.port))
            if say:
                sock.sendall(say)
            return sock
        sock.close()
        return None


def _site(room: Room) -> None:
    room.site()
    for name in ("scontrol", "squeue", "sacct"):
        made = room.top / "bin" / name
        made.write_text(_SCONTROL.format(top=room.top))
        made.chmod(0o755)
    (room.top / "asked").touch()
    (room.top / "asked").chmod(0o666)


def _large_jobs(room: Room, count: int, steps: int = 1) -> None:
    """Write rosters of 1,000 nodes for each step of jobs 1 to ``count``."""
    member = '{"name":"node%d","ranks":[0,1,2,3],"role":"active"}'
    nodes = ",".join(member % n for n in range(1000))
    for job in range(1, count + 1):
        directory = room.directory(f"state/jobs/{job}", MALLORY)
        now = time.time()
        words = f'"job_id":{job},"started":{now - 60},"updated":{now},"state":"running"'
        (directory / "roster.0.json").write_text(f'{{{words},"nodes":[{nodes}]}}')
        for step in range(1, steps):
            (directory / f"roster.{step}.json").hardlink_to(directory / "roster.0.json")
        room.own(directory)


def _held(say: bytes, count: int, small: bool = False, big: bool = False) -> Any:
    """Return an attack that holds the page up by open connections."""

    def attack(room: Room) -> Got:
        _site(room)
        if big:  # a page that fits into no buffer
            _large_jobs(room, 119)
        page = _Page(room)
        held = [page.connect(say, small) for _ in range(count)]
        time.sleep(0.5)
        worst, threads = 0.0, 0
        for _ in range(4):
            worst = max(worst, page.takes("/"))
            threads = max(threads, page.threads())
            held += [page.connect(say, small) for _ in range(10)]
        what = f"{len(held)} connections: the page comes after {worst:.2f} s at worst"
        return Got(what=f"{what}, {threads} threads", succeeded=worst > WITHIN or threads > 60)

    return attack


def _new_jobs(room: Room) -> Got:
    """Ask for pages of jobs that nobody has asked for before."""
    _site(room)
    page = _Page(room)
    began, before = time.monotonic(), _asked(room)
    numbers = iter(range(1, 100_000))

    def visit() -> None:
        while time.monotonic() < began + 8:
            page.get(f"/job/{next(numbers)}")

    threads = [Thread(target=visit) for _ in range(20)]
    for thread in threads:
        thread.start()
    worst = 0.0
    while time.monotonic() < began + 7:
        worst = max(worst, page.takes("/"))
        time.sleep(0.3)
    for thread in threads:
        thread.join()
    rate = (_asked(room) - before) / (time.monotonic() - began)
    pages = next(numbers)
    what = f"{pages} pages asked for: {rate:.1f} questions a second for Slurm"
    what += f"; the first page comes after {worst:.2f} s at worst"
    return Got(what=what, succeeded=rate > 5 or worst > WITHIN + 1)


def _stale_jobs(room: Room) -> Got:
    """Ask again and again for 60 pages of jobs with large records, which are kept but old."""
    _site(room)
    _large_jobs(room, 60, steps=8)
    page = _Page(room)
    paths = [f"/job/{job}" for job in range(1, 61)]
    known = sum(page.takes(path) < 12 for path in paths)
    began = time.monotonic()

    def visit(first: int) -> None:
        while time.monotonic() < began + 12:
            for path in paths[first::24]:
                page.get(path)

    threads = [Thread(target=visit, args=(first,)) for first in range(24)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    refused, asked, worst = 0, 0, 0.0
    while time.monotonic() < began + 11:
        before = time.monotonic()
        refused += page.get("/")[0] != 200
        asked, worst = asked + 1, max(worst, time.monotonic() - before)
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    what = f"{known} pages of jobs are asked for by 24 visitors: the first page was refused "
    what += f"{refused} of {asked} times, and came after {worst:.2f} s at worst"
    return Got(what=what, succeeded=refused > asked / 4)  # large records alone take seconds


def _asked(room: Room) -> int:
    return len((room.top / "asked").read_text().splitlines())


class _Look(HTMLParser):
    """Finds what a browser would run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "img", "iframe", "object", "embed", "base", "form"):
            self.found.append(tag)
        for name, value in attrs:
            if name.startswith("on") or "javascript:" in (value or "").lower():
                self.found.append(f"{tag} {name}")


def _xss(room: Room) -> Got:
    """Write markup into every record that a page shows."""
    _site(room)
    directory = room.directory("state/jobs/7", MALLORY)
    import json

    def hurting(data: dict[str, Any]) -> str:
        text = json.dumps(data)
        return text.replace(json.dumps(_record()["user"]), json.dumps(XSS))

    node = {"name": XSS, "job_id": 7, "role": XSS, "ranks": [0]}
    more = {"nodes": [node], "checkpoint": {"survives": XSS, "directory": XSS}}
    more |= {"data": {"off": [XSS], "sources": [{"name": XSS}]}, "supervisor": {"host": XSS}}
    (directory / "accusations").mkdir()
    kinds = {
        "roster.0.json": _record(job_id=7, **more),
        "incidents.jsonl": _record(suspects=[XSS], phases={XSS: 1.0}, swaps=[[XSS, XSS]]),
        "progress.jsonl": _record(kind="run", ranks=1),
        "accusations/n1.x.json": _record(node=XSS, job=7),
    }
    for name, data in kinds.items():
        (directory / name).write_text(hurting(data) + "\n")
    room.own(directory)
    page = _Page(room)
    found: list[str] = []
    seen = 0
    for path in ("/", "/job/7", f"/job/{XSS}", f"/{XSS}", "/job/7?x=<script>"):
        status, body = page.get(path.replace(" ", "%20"))
        look = _Look()
        look.feed(body)
        seen += "alert(1)" in body
        found += [f"{path[:8]}: {one}" for one in look.found]
        if "49" in body and "{{7*7}}" not in body and "alert(1)" in body:
            found.append(f"{path[:8]}: a template")
        void(status)
    if not seen:
        raise BenchError("no page shows what was written")
    what = f"markup of records on {seen} pages, what a browser would run: {found or 'nothing'}"
    return Got(what=what, succeeded=bool(found))


def void(_value: object) -> None:
    """Drop a value."""


_GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
Run = Callable[[Room], Got]

ATTACKS = [
    Attack(
        name="web_idle_sockets",
        row="web",
        tries="20 connections that say nothing, to stop the page",
        run=_held(b"", 20),
        seconds=120,
    ),
    Attack(
        name="web_crowd",
        row="web",
        tries="3,000 connections with half a request, to stop the page",
        run=_held(b"GET / HTTP/1.1\r\nHost: ", 3000),
        seconds=120,
    ),
    Attack(
        name="web_slow_readers",
        row="web",
        tries="100 requests whose answers are not read, to stop the page",
        run=_held(_GET, 100, small=True, big=True),
        seconds=120,
    ),
    Attack(
        name="web_new_jobs",
        row="web",
        tries="pages of ever new jobs, to keep Slurm and the page busy",
        run=_new_jobs,
        seconds=120,
    ),
    Attack(
        name="web_stale_jobs",
        row="web",
        tries="old pages of jobs that are kept, to stop the page",
        run=_stale_jobs,
        seconds=240,
    ),
    Attack(
        name="web_markup",
        row="web",
        tries="markup in every record, to run code in a reader's browser",
        run=_xss,
        seconds=120,
    ),
]
