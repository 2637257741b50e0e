"""``robust-status serve``: the command and its HTTP server.

Read-only: GET and HEAD of a few named paths. The Host header must name this server, so that no web
page that a user visits can read it under another name (DNS rebinding).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import ipaddress
import os
import signal
import socket
import threading
import traceback
from collections.abc import Collection, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import IO, NoReturn, Self
from urllib.parse import urlsplit

from robust_slurm.command_line import BAD_INPUT, NO, OK
from robust_slurm.command_line.errors import CommandError, warn
from robust_slurm.command_line.parser import Parser
from robust_slurm.command_line.run import run
from robust_slurm.config import ConfigError, load
from robust_slurm.frames.admission import Strangers
from robust_slurm.frames.lobby import Lobby
from robust_slurm.frames.wire import WireError
from robust_slurm.slurm import SlurmError
from status.metrics.families import Family
from status.source import RecordSource, demo, real
from status.web.pages import Encode, Pages, Response

PORT = 9812
MOST_AT_ONCE = 16  # requests that are answered; for a further one the slowest reader gives way
MOST_WAITING = 256  # connections whose request is not whole; the oldest gives way
IDLE_S = 10.0  # for a request to come in, and for its answer to be read, however slowly
HEAD_BYTES = 16 << 10  # of a request
_FULL = b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: text/plain\r\n\r\n"
EXTRA = "prometheus-client is not installed; install it: pip install 'robust-slurm[serve]'"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class _RequestHead:
    """The head of a request, as far as it has come: a connection is nobody's until it is whole."""

    wanted = HEAD_BYTES

    def __init__(self) -> None:
        self._data = b""

    def preface(self) -> bytes:
        return b""

    def feed(self, data: bytes) -> list[bytes]:
        self._data += data
        if b"\r\n\r\n" in self._data or b"\n\n" in self._data:
            return [self._data]
        if len(self._data) > HEAD_BYTES:
            raise WireError("the head of a request is too long")
        return []


class StatusServer:
    """Serves the pages; ``names``: Host headers that are accepted, without port.

    A request gets a thread once it is whole. Neither connections that send nothing nor readers that
    do not read keep others out: the oldest of them gives way.
    """

    def __init__(self, address: tuple[str, int], pages: Pages, names: Collection[str]) -> None:
        """Bind the address. Raises OSError."""
        self.pages = pages
        self.names = {name.lower() for name in names}
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family, backlog=MOST_WAITING)
        self.server_port = int(self._listener.getsockname()[1])
        self._room = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._lock = threading.Lock()
        self._readers: Strangers[socket.socket] = Strangers(_cut, MOST_AT_ONCE, IDLE_S)
        self._over = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def serve_forever(self) -> None:
        """Serve until ``shutdown``."""
        lobby = Lobby(self._listener, _RequestHead, self._admit, "web", MOST_WAITING, IDLE_S)
        try:
            self._over.wait()
        finally:
            lobby.close().join()

    def shutdown(self) -> None:
        """End ``serve_forever``; callable from any thread."""
        self._over.set()

    def _admit(self, sock: socket.socket, _proof: _RequestHead, head: bytes) -> None:
        """Give a whole request a thread, unless there are as many as are answered at once."""
        if not self._room.acquire(blocking=False):
            with self._lock:
                given_way = self._readers.evict()
            if not (given_way and self._room.acquire(timeout=1.0)):
                with contextlib.suppress(OSError):
                    sock.send(_FULL + b"too many requests at once\n")
                sock.close()
                return
        try:
            threading.Thread(
                target=self._answer, args=(sock, head), name="web-answer", daemon=True
            ).start()
        except RuntimeError:
            self._room.release()
            raise

    def _answer(self, sock: socket.socket, head: bytes) -> None:
        try:
            _Handler(sock, head, self)
        except OSError:  # the reader has gone, or is too slow
            pass
        except Exception:  # noqa: BLE001 - one request's fault must not end the server
            traceback.print_exc()
        finally:
            self.has_read(sock)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            with self._lock:  # nobody shuts down another socket of this number
                sock.close()
            self._room.release()

    def reads(self, sock: socket.socket) -> None:
        """Note that it is the reader's turn: an answer is being sent."""
        with self._lock:
            self._readers.enter(sock)

    def has_read(self, sock: socket.socket) -> None:
        with self._lock:
            self._readers.leave(sock)


def _cut(sock: socket.socket, _why: str) -> None:
    """End a connection that another thread uses."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    timeout = IDLE_S
    server_version = "robust-status"
    sys_version = ""

    def __init__(self, sock: socket.socket, head: bytes, server: StatusServer) -> None:
        """Answer the request whose head is given."""
        self._head = head
        self.status = server
        super().__init__(sock, ("", 0), server)  # type: ignore[arg-type]

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BytesIO(self._head)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        response = self._response()
        self.status.reads(self.request)
        self.send_response(response.status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", response.kind)
        self.send_header("Content-Length", str(len(response.body)))
        self.end_headers()
        if with_body:
            self.wfile.write(response.body)

    def _response(self) -> Response:
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or host_name(hosts[0]) not in self.status.names:
            return Response(421, "text/plain", b"this server has another name: see --allow-host\n")
        try:
            path = self.path.partition("?")[0]
            return self.status.pages.get(path, self.headers.get("Accept") or "")
        except Exception as error:  # noqa: BLE001 - one page's fault must not end the server
            text = f"{self.path[:80]!r}: {type(error).__name__}: {error}"
            warn("robust-status serve", text)
            return Response(500, "text/plain", b"internal error; see the server's stderr\n")

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: every reload would be a line."""


def host_name(header: str) -> str:
    """The name in a Host header, in lower case, without port and brackets; "" for none."""
    try:
        return (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def encoder() -> Encode | None:
    """The encoder of metrics in the form that a scraper accepts; None: not installed."""
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
        from prometheus_client.exposition import choose_encoder
    except ImportError:
        return None

    class Made:
        def __init__(self, families: list[Family]) -> None:
            self._families = families

        def collect(self) -> list[Metric]:
            kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
            out: list[Metric] = []
            for family in self._families:
                metric = kinds[family.kind](family.name, family.help, labels=list(family.labels))
                for labels, value in family.samples.items():
                    metric.add_metric(list(labels), value)
                out.append(metric)
            return out

    def encode(families: list[Family], accept: str) -> tuple[bytes, str]:
        registry = CollectorRegistry()
        registry.register(Made(families))
        make, kind = choose_encoder(accept)
        return make(registry), kind

    return encode


def server(
    source: RecordSource, listen: str, port: int, allowed: Sequence[str] = ()
) -> StatusServer:
    """Return a server, bound but not started. Raises OSError, or ImportError without the extra."""
    encode = encoder()
    if encode is None:
        raise ImportError(EXTRA)
    names = {*allowed, listen}
    if _is_loopback(listen):
        names |= {"localhost", "127.0.0.1", "::1"}
    return StatusServer((listen, port), Pages(source, encode), names)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def main(argv: Sequence[str]) -> int:
    """Serve until interrupted. Exit codes: 0 interrupted, 1 cannot serve, 2 usage."""
    codes = {ConfigError: BAD_INPUT, SlurmError: NO}
    return run(build_parser(), argv, _serve, codes=codes)


def _serve(args: argparse.Namespace, out: IO[str]) -> int:
    named = {"robust-state-dir": args.state_dir} if args.state_dir else {}
    config = load(cli=named, warn=partial(warn, "robust-status serve"))
    if os.geteuid() == 0 and not (args.allow_root or args.demo):
        raise CommandError(
            "serve shows every reader what this user may read; run it as a user without rights, or "
            "with --allow-root"
        )
    signal.signal(signal.SIGTERM, _end)
    try:
        with demo() if args.demo else real(config, None) as source:
            running = server(source, args.listen, args.port, args.allow_host)
            with running:
                where = args.listen if ":" not in args.listen else f"[{args.listen}]"
                print(f"http://{where}:{running.server_port}/", file=out, flush=True)
                running.serve_forever()
    except KeyboardInterrupt:
        return OK
    except (OSError, ImportError) as error:
        raise CommandError(f"cannot serve: {error}") from None
    return OK


def _end(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def build_parser() -> Parser:
    parser = Parser(
        prog="robust-status serve",
        description="Serve the report as a read-only web page (/, /job/ID), as Prometheus metrics "
        "(/metrics) and as JSON (/status.json).",
    )
    parser.add_argument(
        "--listen", default="127.0.0.1", metavar="ADDRESS", help="address (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=_port, default=PORT, metavar="PORT", help="port (default: %(default)s)"
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="also accept requests to this host name (for another address than loopback)",
    )
    parser.add_argument("--state-dir", metavar="DIR", help="directory of the jobs' records")
    parser.add_argument("--demo", action="store_true", help="serve the sample cluster")
    parser.add_argument("--allow-root", action="store_true", help="serve although run by root")
    return parser


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"not a port: {text[:40]!r}")
    return int(text)
