"""robust-status serve: read-only, a few paths, and only under its own name."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from unittest.mock import MagicMock

import pytest
from status_records import NOW
from waiting import until

from status.source import RecordSource, demo
from status.web.pages import MOST_CACHED, NEW_JOBS, Pages, Response
from status.web.serve import (
    MOST_AT_ONCE,
    MOST_WAITING,
    StatusServer,
    host_name,
    main,
    server,
)

pytest.importorskip("prometheus_client")


@pytest.fixture(scope="module")
def running() -> Iterator[StatusServer]:
    with demo(NOW) as source, server(source, "127.0.0.1", 0, ["login1"]) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def asked(
    running: StatusServer, path: str, host: str = "localhost", method: str = "GET"
) -> tuple[int, dict[str, str], bytes]:
    line = http.client.HTTPConnection("127.0.0.1", running.server_port, timeout=30)
    line.putrequest(method, path, skip_host=True)
    if host:
        line.putheader("Host", host)
    line.endheaders()
    answer = line.getresponse()
    body = answer.read()
    line.close()
    return answer.status, dict(answer.getheaders()), body


@pytest.mark.parametrize(
    ("path", "kind", "part"),
    [
        ("/", "text/html", b"recovering from a fault"),
        ("/?x=/etc/passwd", "text/html", b"Needs attention"),
        ("/job/118", "text/html", b"Timeline"),
        ("/metrics", "text/plain", b"robust_slurm_slurm_up 1"),
        ("/status.json", "application/json", b'"attention"'),
    ],
)
def test_pages(running: StatusServer, path: str, kind: str, part: bytes) -> None:
    status, headers, body = asked(running, path)
    assert status == 200 and headers["Content-Type"].startswith(kind) and part in body
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert asked(running, path, method="HEAD")[::2] == (200, b"")
    if kind == "application/json":
        assert json.loads(body)["version"] == 1


def serving() -> int:
    """The number of threads that answer a request; other tests of this process leave other ones."""
    return sum(thread.name == "web-answer" for thread in threading.enumerate())


def test_requests_that_never_come_hold_neither_threads_nor_the_server(
    running: StatusServer,
) -> None:
    """20 idle connections stopped the page for 7.6 s; a byte now and then kept a thread."""
    address = ("127.0.0.1", running.server_port)
    until(lambda: serving() == 0, "the end of earlier requests")
    slow = [socket.create_connection(address) for _ in range(2 * MOST_WAITING)]
    for sock in slow:
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"GET / HT")
    began = time.monotonic()
    assert asked(running, "/")[0] == 200
    assert time.monotonic() - began < 3 and serving() <= 1
    for sock in slow[:MOST_WAITING]:  # the oldest have given way
        sock.settimeout(10)
        with contextlib.suppress(ConnectionError):
            assert sock.recv(100) == b""
    for sock in slow:
        sock.close()


def test_readers_that_do_not_read_give_way(running: StatusServer) -> None:
    """A page that fits into no socket's buffer kept a thread for 10 s; 16 readers kept all."""
    pages = running.pages
    running.pages = MagicMock(get=lambda *_: Response(200, "text/plain", bytes(32 << 20)))
    slow = []
    for _ in range(2 * MOST_AT_ONCE):
        sock = socket.create_connection(("127.0.0.1", running.server_port))
        sock.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
        slow.append(sock)
    until(lambda: serving() == MOST_AT_ONCE, "a thread for each")
    running.pages = pages
    began = time.monotonic()
    assert asked(running, "/")[0] == 200
    assert time.monotonic() - began < 3
    for sock in slow:
        sock.close()
    until(lambda: serving() == 0, "the end of all of them")


def test_a_head_without_an_end_is_not_kept(running: StatusServer) -> None:
    with socket.create_connection(("127.0.0.1", running.server_port)) as sock:
        sock.settimeout(10)
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                sock.sendall(b"X: " + b"x" * 4096 + b"\r\n")
            assert sock.recv(100) == b""


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        *((p, "GET", 404) for p in ("/job/", "/job/7", "/job/118/", "/job/0118", "//etc/passwd",
                                    "/job/../../etc/passwd", "/..%2f..%2fetc/passwd",
                                    "/job/9999999999", "/templates/report.css.j2", "/job/%31")),
        *(("/", m, 501) for m in ("POST", "PUT", "DELETE", "OPTIONS")),
    ],
)  # fmt: skip
def test_nothing_else(running: StatusServer, path: str, method: str, status: int) -> None:
    assert asked(running, path, method=method)[0] == status


@pytest.mark.parametrize(
    ("host", "right"),
    [
        ("localhost", True), ("LOCALHOST:9812", True), ("127.0.0.1:1", True), ("[::1]:80", True),
        ("login1:9812", True), ("login1.", True), ("evil.example", False), ("", False),
        ("localhost.evil.example", False), ("evil.example:localhost", False), ("[::1", False),
        ("localhost@evil.example", False), ("127.0.0.1.nip.io", False), ("169.254.1.1", False),
    ],
)  # fmt: skip
def test_only_under_its_own_name(running: StatusServer, host: str, right: bool) -> None:
    assert asked(running, "/metrics", host)[0] == (200 if right else 421)


def test_host_names() -> None:
    assert host_name("A.B:80") == "a.b" and host_name("[::1]") == "::1"
    assert host_name("x]:[") == "" or host_name("x]:[") != "localhost"


def test_visitors_cannot_make_slurm_busy() -> None:
    looks = [0]
    now = [100.0]
    with demo(NOW) as source:
        count = source.door.ping

        def ping() -> bool:
            looks[0] += 1
            return count()

        source.door.ping = ping  # type: ignore[method-assign]
        pages = Pages(source, lambda families, accept: (b"", "x"), lambda: now[0])
        for _ in range(20):
            assert pages.get("/").status == 200
        assert looks == [1]
        now[0] += 6
        pages.get("/")
        assert looks == [2]
        said = [pages.get(f"/job/{number}").status for number in range(1, 50)]
        assert said == [404] * NEW_JOBS + [503] * (49 - NEW_JOBS)
        assert looks == [3], "one look for all of them"
        assert pages.get("/job/1").status == 404, "it is kept"
        now[0] += 6
        assert pages.get("/job/1").status == 404 and looks == [4]
        for number in range(1, MOST_CACHED + 20):
            now[0] += 1
            assert pages.get(f"/job/{number}").status == 404
        assert len(pages._made) == MOST_CACHED


def test_pages_of_jobs_hold_up_no_other_page() -> None:
    with demo(NOW) as source:
        pages = Pages(source, lambda families, accept: (b"", "x"))
        with pages._job_lock:
            assert pages.get("/").status == 200


def test_stale_pages_of_jobs_do_not_wait_for_each_other() -> None:
    """24 visitors of 60 old pages held every thread, and "/" was refused 40 times of 40."""
    now = [100.0]
    with demo(NOW) as source:
        pages = Pages(source, lambda families, accept: (b"", "x"), lambda: now[0])
        for number in range(1, 31):
            now[0] += 1
            assert pages.get(f"/job/{number}").status == 404
        now[0] += 60
        held = MagicMock(acquire=MagicMock(return_value=False))
        pages._job_lock = held
        said = [pages.get(f"/job/{number}") for number in range(1, 31)]
        assert held.acquire.call_count == NEW_JOBS
        assert [page.status for page in said] == [404] * 30, "the copies that are kept"
        assert said[29].body == b"no record of job 30\n"


def test_it_says_what_it_cannot_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--port", "99999999"]) == 2
    assert main(["--nope"]) == 2
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert main([]) == 1
    assert "--allow-root" in capsys.readouterr().err
    assert main(["--demo", "--listen", "192.0.2.1"]) == 1
    assert "cannot serve" in capsys.readouterr().err
    monkeypatch.setattr("status.web.serve.encoder", lambda: None)
    assert main(["--demo", "--port", "0"]) == 1
    assert "robust-slurm[serve]" in capsys.readouterr().err


def test_a_source_stands_still_where_it_is_told() -> None:
    with demo(NOW) as source:
        assert isinstance(source, RecordSource) and source.now == NOW


def test_a_reader_that_goes_away_is_no_error(
    running: StatusServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor is a path of no form; each was a line or a traceback on stderr."""
    assert asked(running, "http://[/")[0] == 404
    with socket.create_connection(("127.0.0.1", running.server_port)) as sock:
        sock.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: serving() == 0, "its end")
    assert capfd.readouterr().err == ""
