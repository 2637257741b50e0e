"""``robust-status serve``: the command and its HTTP server.

Read-only: GET and HEAD of a few named paths. The Host header must name this server, so that no web
page that a user visits can read it under another name (DNS rebinding).
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import IO, Any, NoReturn
from urllib.parse import urlsplit

from robust_slurm.command_line import BAD_INPUT, NO, OK
from robust_slurm.command_line.errors import CommandError, warn
from robust_slurm.command_line.parser import Parser
from robust_slurm.command_line.run import run
from robust_slurm.config import ConfigError, load
from robust_slurm.slurm import SlurmError
from status.metrics.families import Family
from status.source import RecordSource, demo, real
from status.web.pages import Encode, Pages, Response

PORT = 9812
MOST_AT_ONCE = 16  # connections; more are refused with 503
IDLE_S = 10.0  # for a request to come in, however slowly
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


class StatusServer(ThreadingHTTPServer):
    """Serves the pages; ``names``: Host headers that are accepted, without port."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], pages: Pages, names: Collection[str]) -> None:
        self.pages = pages
        self.names = {name.lower() for name in names}
        self._room = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._since: dict[socket.socket, float] = {}
        """Connections whose request is not whole yet, and when each was accepted."""
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give the connection a thread, unless there are as many as are served at once."""
        if not self._room.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.setblocking(False)
                request.send(_FULL + b"too many requests at once\n")
            self.shutdown_request(request)
            return
        self._since[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread
            self._over(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._over(request)

    def arrived(self, request: Any) -> None:
        """Note that a connection's request is whole."""
        self._since.pop(request, None)

    def _over(self, request: Any) -> None:
        self.arrived(request)
        self._room.release()

    def service_actions(self) -> None:
        """End connections whose request takes too long to come; called all the time."""
        for request, since in list(self._since.items()):
            if time.monotonic() - since > IDLE_S:
                self.arrived(request)
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing when a reader disconnects, instead of a traceback each time."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    timeout = IDLE_S
    server: StatusServer
    server_version = "robust-status"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        self.server.arrived(self.request)
        response = self._response()
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
        if len(hosts) != 1 or host_name(hosts[0]) not in self.server.names:
            return Response(421, "text/plain", b"this server has another name: see --allow-host\n")
        try:
            path = self.path.partition("?")[0]
            return self.server.pages.get(path, self.headers.get("Accept") or "")
        except Exception as error:  # noqa: BLE001 - one page's fault must not end the server
            print(f"robust-status: {self.path[:80]!r}: {type(error).__name__}: {error}",
                  file=sys.stderr)  # fmt: skip
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
