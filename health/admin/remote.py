"""Nodes over SSH: a request goes to ``health.admin.node`` there, its reply comes back.

Host keys are checked against known_hosts files, never learned. Keys come from the agent, from
~/.ssh or from ``--identity``; passwords are not asked for. paramiko is imported only here.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import shlex
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import paramiko

from health.admin.install import InstallError
from health.admin.node import LOCK_S, MARK, PROBE_S, AdminReply, AdminRequest
from health.admin.render import Prefix
from robust_slurm import commands
from robust_slurm.command_line.progress import ProgressBar
from robust_slurm.text import one_line, shown

WORKERS = 16
CONNECT_S = 10.0  # each of: connection, the server's banner, authentication
COMMAND_S = LOCK_S + PROBE_S + 30.0  # the node's own message comes before our time is over
REPLY_LIMIT = 4 << 20  # bytes
REPLY_LINE = 2000  # characters of an error
_TEMPLATES = Path(__file__).resolve().parents[2] / "templates"
KNOWN_HOSTS = ("~/.ssh/known_hosts", "/etc/ssh/ssh_known_hosts")


class KnownHosts:
    """Host keys out of known_hosts files: plain names, hashed names and patterns.

    Keys marked @revoked are left out wherever they stand, and so are @cert-authority lines: host
    certificates are not supported. A line that cannot be read proves no host, as for ssh.
    """

    def __init__(self, texts: Iterable[str]):
        lines = [line.split() for text in texts for line in text.splitlines()]
        revoked = {words[3] for words in lines if words[:1] == ["@revoked"] and len(words) > 3}
        self._plain: dict[str, list[list[str]]] = {}
        self._others: list[tuple[list[str], list[str]]] = []
        for words in lines:
            if len(words) < 3 or words[0].startswith(("#", "@")) or words[2] in revoked:
                continue
            names = words[0].split(",")
            if any(name.startswith(("|", "!")) or set(name) & set("*?") for name in names):
                self._others.append((names, words))
            else:
                for name in names:
                    self._plain.setdefault(name, []).append(words)

    def keys(self, host: str) -> dict[str, paramiko.PKey]:
        """The host's keys by type; the first of a type counts."""
        lines = [*self._plain.get(host, []), *(w for n, w in self._others if _matches(host, n))]
        found: dict[str, paramiko.PKey] = {}
        for words in lines:
            try:
                entry = paramiko.hostkeys.HostKeyEntry.from_line(" ".join([host, *words[1:3]]))
            except (paramiko.SSHException, ValueError):
                continue
            if entry is not None and entry.key is not None:
                found.setdefault(entry.key.get_name(), entry.key)
        return found


def _matches(host: str, names: Iterable[str]) -> bool:
    found = False
    for name in names:
        if name.startswith("|"):
            found = found or _is_hash_of(name, host)
        elif fnmatchcase(host, name.removeprefix("!").replace("[", "[[]")):
            if name.startswith("!"):
                return False
            found = True
    return found


def _is_hash_of(name: str, host: str) -> bool:
    try:
        return hmac.compare_digest(paramiko.HostKeys.hash_host(host, name), name)
    except (AssertionError, ValueError, IndexError):  # no salt of the right length in it
        return False


class Access(NamedTuple):
    """The way to reach nodes. ``prefix``: what runs there; ``identity`` empty: agent and ~/.ssh."""

    user: str
    port: int
    identity: str
    hosts: KnownHosts
    prefix: Prefix

    def host(self, node: str) -> str:
        """The node as known_hosts names it."""
        return node if self.port == 22 else f"[{node}]:{self.port}"


def known_hosts(named: str = "") -> KnownHosts:
    """The file that was named, which must be readable, or else the user's and the system's."""
    texts = []
    for name in (named,) if named else KNOWN_HOSTS:
        path = Path(name).expanduser()
        try:
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
        except OSError as error:
            if named:
                raise InstallError(f"--known-hosts {path}: {error.strerror}") from error
    return KnownHosts(texts)


def ask_all(access: Access, requests: Mapping[str, AdminRequest]) -> dict[str, AdminReply]:
    """Every node's reply, at most WORKERS at a time; a node that fails stops no other."""
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # each error is in a reply
    with (
        ProgressBar("asking", len(requests), "nodes") as progress,
        ThreadPoolExecutor(WORKERS) as pool,
    ):

        def one(node: str) -> AdminReply:
            reply = ask(node, access, requests[node])
            progress.add(1)
            return reply

        return dict(zip(requests, pool.map(one, requests), strict=True))


def ask(node: str, access: Access, request: AdminRequest) -> AdminReply:
    """One node's reply; whatever goes wrong on the way is the reply's error."""
    client = paramiko.SSHClient()
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    try:
        for kind, key in access.hosts.keys(access.host(node)).items():
            client.get_host_keys().add(access.host(node), kind, key)
        client.connect(
            node,
            port=access.port,
            username=access.user,
            key_filename=[access.identity] if access.identity else None,
            look_for_keys=not access.identity,
            timeout=CONNECT_S,
            banner_timeout=0.8 * CONNECT_S,  # before the others: its error is the telling one
            auth_timeout=CONNECT_S,
        )
        return _command(client, node, access, request.as_json())
    except Exception as error:  # noqa: BLE001 - paramiko raises nearly anything at a bad peer
        return AdminReply(error=_why(node, access, error))
    finally:
        client.close()


def _command(client: paramiko.SSHClient, node: str, access: Access, text: str) -> AdminReply:
    """The node's reply. paramiko waits for some answers without a limit: the timer ends those."""
    transport = client.get_transport()
    assert transport is not None
    late = threading.Event()

    def give_up() -> None:
        late.set()
        transport.close()  # ends every wait of a channel

    timer = threading.Timer(COMMAND_S, give_up)
    timer.daemon = True
    timer.start()
    out = said = ""
    try:
        out, said = _output(transport, access, text)
    except (paramiko.SSHException, OSError, EOFError):
        if not late.is_set():
            raise
    finally:
        timer.cancel()
    for line in reversed(out.splitlines()):
        if line.startswith(MARK):
            return read_reply(line[len(MARK) :])
    if late.is_set():
        return AdminReply(
            error=f"{node} accepted the SSH login, but did not finish within {COMMAND_S:g} s: its "
            "/etc or the prefix's file system may hang; repair the node, then run the same "
            "command again"
        )
    return AdminReply(
        error=f"{access.prefix.python} did not answer there: {said}; do the nodes see the prefix?"
    )


def read_reply(text: str) -> AdminReply:
    """Read a node's reply as text for a terminal, one line each but for the diffs.

    A node may send anything. Raises ValueError for what is no reply.
    """
    try:
        found = AdminReply(**json.loads(text))
        changes = [(str(action), str(path), str(diff)) for action, path, diff in found.changes]
        notes = [one_line(str(note)) for note in found.notes]
    except (ValueError, TypeError, RecursionError):
        raise ValueError("its reply is not understood") from None
    return AdminReply(
        one_line(str(found.error), REPLY_LINE),
        one_line(str(found.identity)),
        [(one_line(action), one_line(path), shown(diff)) for action, path, diff in changes],
        notes,
        found.done is True,
    )


def command(prefix: Prefix) -> str:
    """Return the command of a node's part: a shell looks who could change what Python would run
    and import, and only then starts it, without ``site``."""
    sites = os.pathsep.join(prefix.sites)
    options = ["-I", "-S", "-X", f"{commands.SITES}={sites}"]
    held = (site for site in prefix.sites if Path(site, "robust_slurm").is_dir())
    own = next(held, prefix.sites[0])
    words = [prefix.python, *options, f"{own}/robust_slurm/commands.py", "health.admin.node"]
    script = (_TEMPLATES / "look.sh").read_text("utf-8")
    return shlex.join(["/bin/sh", "-c", script, "sh", *prefix.library, *prefix.sites, "--", *words])


def _output(transport: paramiko.Transport, access: Access, text: str) -> tuple[str, str]:
    """The command's standard output, and its last words or else its exit code."""
    channel = transport.open_session(timeout=CONNECT_S)
    channel.exec_command(command(access.prefix))
    try:
        channel.sendall(text.encode())
        channel.shutdown_write()
    except OSError:  # it ended already; what it said is more telling
        pass
    out, err = _read(channel.recv), _read(channel.recv_stderr)
    said = one_line(" ".join((err or out).split())[-300:])
    return out, said or f"exit code {channel.recv_exit_status()}"


def _read(receive: Callable[[int], bytes]) -> str:
    data = b""
    while len(data) < REPLY_LIMIT:
        part = receive(1 << 16)
        if not part:
            break
        data += part
    return data.decode("utf-8", "replace")


def _why(node: str, access: Access, error: Exception) -> str:
    """Describe an error of the connection, and what to do next."""
    scan = f"ssh-keyscan -p {access.port} {node}" if access.port != 22 else f"ssh-keyscan {node}"
    if isinstance(error, paramiko.BadHostKeyException):
        return (
            f"its host key is not the one in known_hosts: a new machine, or a man-in-the-middle "
            f"attack; "
            f"if it is new: ssh-keygen -R {shlex.quote(access.host(node))}, then add its key"
        )
    text = one_line(str(error)) or type(error).__name__  # parts of it may be the peer's
    if isinstance(error, paramiko.AuthenticationException):
        which = access.identity or "no key of the agent or ~/.ssh"
        return f"user {access.user}: {text}; {which} was accepted? (ssh-add, authorized_keys)"
    if isinstance(error, paramiko.SSHException) and "not found in known_hosts" in text:
        return (
            f"its host key is not known; compare it on the node, then: {scan} >> "
            "~/.ssh/known_hosts (or name a file with --known-hosts)"
        )
    if isinstance(error, socket.gaierror):
        return f"no address for this name: {error.strerror}"
    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        text = one_line(str(error.strerror))
    # paramiko's words when no banner came, and when the time for the key exchange is over.
    silent = text.startswith(("Error reading SSH protocol banner", "No existing session"))
    silent = silent or isinstance(error, TimeoutError)
    if silent or isinstance(error, OSError):
        text = f"no SSH server answered within {CONNECT_S:g} s" if silent else text
        return f"no SSH answer at port {access.port}: {text}"
    return f"SSH failed: {text}"
