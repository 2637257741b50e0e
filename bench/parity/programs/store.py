"""An object store on the batch host: GET /S answers after S seconds; PUT /S says 503 for S."""

from __future__ import annotations

import http.server
import os
import sys
import time


class SlowStore(http.server.BaseHTTPRequestHandler):
    """A store that is slow."""

    first = 0.0

    def do_GET(self) -> None:
        """Answer late."""
        time.sleep(float(self.path[1:]))
        self.send_response(200)
        self.end_headers()

    def do_PUT(self) -> None:
        """Be too busy for a while."""
        SlowStore.first = SlowStore.first or time.monotonic()
        late = time.monotonic() > SlowStore.first + float(self.path[1:])
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.send_response(200 if late else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


port = int(sys.argv[1])
if os.fork():
    os._exit(0)
http.server.ThreadingHTTPServer(("", port), SlowStore).serve_forever()
