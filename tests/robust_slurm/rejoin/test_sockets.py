"""The sockets that are shut down to end a collective of gloo, and no others."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from robust_slurm.rejoin import collectives


@pytest.mark.parametrize(("services", "shut"), [(0, True), (1 << 16, False)])
def test_a_connection_to_a_service_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, services: int, shut: bool
) -> None:
    """Another thread may open one while a process group is made."""
    monkeypatch.setattr(collectives, "SERVICES", services)
    sockets = collectives.Sockets()
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        before = stack.enter_context(socket.create_connection(server.getsockname()))
        with sockets._opening():
            during = stack.enter_context(socket.create_connection(server.getsockname()))
        sockets.shut()
        for line, closed in ((before, False), (during, shut)):
            line.setblocking(False)
            try:
                assert line.recv(1) == b"" and closed
            except BlockingIOError:
                assert not closed
