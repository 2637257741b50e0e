"""Nodes that accept an SSH login and then hang: each must end in an error within the limit."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

paramiko = pytest.importorskip("paramiko")

from health.admin import remote  # noqa: E402 - after the guard
from health.admin.node import LOCK_S, MARK, PROBE_S, AdminRequest  # noqa: E402
from health.admin.render import Prefix  # noqa: E402

Serve = Callable[["paramiko.Channel"], None]


class OneNode(paramiko.ServerInterface):  # type: ignore[misc, unused-ignore]
    """A node's SSH server for one login; ``serve`` is what it does with the command's channel."""

    def __init__(self, serve: Serve | None):
        self._serve = serve
        self.over = threading.Event()

    def check_auth_publickey(self, username: str, key: object) -> int:
        return int(paramiko.AUTH_SUCCESSFUL)

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return int(paramiko.OPEN_SUCCEEDED)

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        if self._serve is None:
            self.over.wait(60)
            return False
        self._channel = channel  # paramiko closes one that nobody holds
        threading.Thread(target=self._run, args=(self._serve, channel), daemon=True).start()
        return True

    def _run(self, serve: Serve, channel: paramiko.Channel) -> None:
        """Serve after the request has come, so the client knows that its command was started."""
        while channel.recv(1 << 16):
            pass
        serve(channel)


class HangingNode:
    """The SSH server of one test: ``ask`` sends it a request."""

    def __init__(self, tmp_path: Path):
        self._key = paramiko.ECDSAKey.generate()
        self._identity = tmp_path / "user"
        paramiko.ECDSAKey.generate().write_private_key_file(str(self._identity))
        self._listen = socket.create_server(("127.0.0.1", 0))
        self._opened: list[tuple[OneNode, paramiko.Transport]] = []

    def ask(self, serve: Serve | None) -> remote.AdminReply:
        threading.Thread(target=self._accept, args=(serve,), daemon=True).start()
        port = self._listen.getsockname()[1]
        line = f"[127.0.0.1]:{port} {self._key.get_name()} {self._key.get_base64()}"
        hosts = remote.KnownHosts([line])
        prefix = Prefix("/opt/bin/python3", ("/opt",), ("/opt",))
        access = remote.Access("root", port, str(self._identity), hosts, prefix)
        return remote.ask("127.0.0.1", access, AdminRequest("install", "/etc/robust"))

    def _accept(self, serve: Serve | None) -> None:
        transport = paramiko.Transport(self._listen.accept()[0])
        transport.add_server_key(self._key)
        node = OneNode(serve)
        self._opened.append((node, transport))
        transport.start_server(server=node)

    def close(self) -> None:
        for node, transport in self._opened:
            node.over.set()
            transport.close()
        self._listen.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[HangingNode]:
    made = HangingNode(tmp_path)
    yield made
    made.close()


def no_exit_code(channel: paramiko.Channel) -> None:
    channel.shutdown_write()


def no_output(_channel: paramiko.Channel) -> None:
    pass


@pytest.mark.timeout(40)
@pytest.mark.parametrize("serve", [no_exit_code, no_output, None], ids=["end", "middle", "start"])
def test_a_node_that_hangs_is_given_up(
    node: HangingNode, serve: Serve | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "COMMAND_S", 1.0)
    reply = node.ask(serve)
    assert "127.0.0.1 accepted the SSH login, but did not finish within 1 s" in reply.error
    assert reply.error.endswith("run the same command again")


def test_a_transport_that_is_closed_while_the_session_opens_is_a_node_that_hangs(
    node: HangingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """paramiko raises EOFError then: the login is over, the channel is not yet open."""

    def opened(transport: paramiko.Transport, timeout: float) -> None:
        while transport.is_active():
            time.sleep(0.01)
        raise EOFError

    monkeypatch.setattr(remote, "COMMAND_S", 0.2)
    monkeypatch.setattr(paramiko.Transport, "open_session", opened)
    assert "did not finish within 0.2 s" in node.ask(no_output).error


def test_the_nodes_own_message_about_its_lock_or_python_arrives() -> None:
    assert remote.COMMAND_S >= LOCK_S + PROBE_S + 2 * remote.CONNECT_S


def test_a_reply_counts_although_the_command_does_not_end(node: HangingNode) -> None:
    def serve(channel: paramiko.Channel) -> None:
        channel.sendall(f'{MARK}{{"notes": ["did it"]}}\n'.encode())
        channel.shutdown_write()

    assert list(node.ask(serve).notes) == ["did it"]


def test_an_exit_code_without_a_word_is_reported(node: HangingNode) -> None:
    def serve(channel: paramiko.Channel) -> None:
        channel.send_exit_status(7)
        channel.close()

    assert "did not answer there: exit code 7;" in node.ask(serve).error
