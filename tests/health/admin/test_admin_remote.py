"""Nodes over SSH: a real sshd on loopback addresses, each of which has an /etc/… of its own."""

from __future__ import annotations

import getpass
import io
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from admin_prefix import make_prefix, rooms_of
from waiting import until

pytestmark = pytest.mark.slow

paramiko = pytest.importorskip("paramiko")

from health.admin import cli, remote, render  # noqa: E402 - after the guard
from health.admin.node import AdminRequest  # noqa: E402
from health.settings_file import END  # noqa: E402

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
NODES = "127.0.0.[1-3]"
STRANGER, SWAPPED, REFUSED, MUTE = "127.0.0.4", "127.0.0.5", "127.0.0.6", "127.0.0.7"

CONFIG = """
Port {port}
{listen}
HostKey {top}/host
PidFile none
AuthorizedKeysFile {top}/user.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
{matches}
"""
# A node has its own directory at the place where all have theirs.
MATCH = """
Match LocalAddress {address}
  ForceCommand exec unshare -m sh -c 'mount --bind {own} {etc} && eval "exec $SSH_ORIGINAL_COMMAND"'
"""


class Fleet(NamedTuple):
    top: Path
    etc: Path
    port: int
    prefix: Path

    def own(self, last: int) -> Path:
        """Return the directory that lies at ``etc`` on the node 127.0.0.<last>."""
        return self.top / f"etc-{last}"

    def admin(self, *words: str, nodes: str = NODES, yes: bool = True) -> tuple[int, str]:
        out = io.StringIO()
        argv = [*words, "--nodes", nodes, "--ssh", "--port", str(self.port)]
        argv += ["--user", getpass.getuser(), "--identity", str(self.top / "user")]
        argv += ["--known-hosts", str(self.top / "known"), "--prefix", str(self.prefix)]
        argv += ["--etc", str(self.etc), "--tmpfiles", "", *(["--yes"] if yes else [])]
        return cli.main(argv, out), out.getvalue()

    def access(self, python: str = "", identity: str = "") -> remote.Access:
        hosts = remote.known_hosts(str(self.top / "known"))
        key = identity or str(self.top / "user")
        prefix = render.find_prefix(str(self.prefix))
        prefix = prefix._replace(python=python or prefix.python)
        return remote.Access(getpass.getuser(), self.port, key, hosts, prefix)


def keygen(path: Path) -> str:
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)]
    subprocess.run(argv, check=True, timeout=30, stdin=subprocess.DEVNULL)
    return path.with_name(f"{path.name}.pub").read_text().strip()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.5", port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    if SSHD is None:
        pytest.skip("no sshd: apt-get install openssh-server")
    if os.geteuid() != 0:
        pytest.skip("nodes with an /etc of their own need root (mount namespaces)")
    top = tmp_path_factory.mktemp("fleet")
    etc, port = top / "etc", free_port()
    host, _ = keygen(top / "host"), keygen(top / "user")
    other = keygen(top / "other")
    for last in (1, 2, 3):
        (top / f"etc-{last}").mkdir()
    etc.mkdir()
    (top / "spool").mkdir()
    known = [f"[127.0.0.{i}]:{port} {host}" for i in (1, 2, 3, 6, 7)]
    (top / "known").write_text("\n".join([*known, f"[{SWAPPED}]:{port} {other}"]) + "\n")
    matches = [
        MATCH.format(address=f"127.0.0.{i}", own=top / f"etc-{i}", etc=etc) for i in (1, 2, 3)
    ]
    listen = "\n".join(f"ListenAddress 127.0.0.{i}" for i in range(1, 6))
    text = CONFIG.format(port=port, listen=listen, top=top, matches="".join(matches))
    (top / "sshd_config").write_text(text)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    argv = [SSHD, "-D", "-e", "-f", str(top / "sshd_config")]
    with (top / "log").open("wb") as log:
        server = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until(lambda: server.poll() is not None or answers(port), f"sshd, see {top}/log", 20)
        assert server.poll() is None, (top / "log").read_text()
        prefix = make_prefix(top / "prefix", fakes=True)
        yield Fleet(top, etc, port, prefix)
    finally:
        server.kill()
        server.wait()


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest) -> None:
    """Remove all that is installed on any node; leave a robust.toml on the machine at hand."""
    if "fleet" not in request.fixturenames:
        return
    fleet: Fleet = request.getfixturevalue("fleet")
    for directory in (fleet.etc, *(fleet.own(i) for i in (1, 2, 3))):
        shutil.rmtree(directory)
        directory.mkdir()
    (fleet.etc / "robust.toml").write_text(f'[gate]\nspool = "{fleet.top}/spool"\n{END}\n')


INSTALLED = [
    *("epilog", "healthcheck", "manifest.json"),
    *("prolog", "robust.toml", "robust.toml.last"),
]


def there(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# ---- what it does


def test_install_again_and_uninstall(fleet: Fleet) -> None:
    code, text = fleet.admin("install")
    assert code == 0, text
    assert "=== on 127.0.0.[1-3]\n" in text, "a change that all need is shown once"
    assert text.count("+++ ") == 4
    assert re.search(r"^127\.0\.0\.\[1-3\]  done  ", text, re.MULTILINE)
    for last in (1, 2, 3):
        assert there(fleet.own(last)) == INSTALLED
        text = (fleet.own(last) / "robust.toml").read_text()
        assert text == (fleet.etc / "robust.toml").read_text(), "the file of this machine"
    assert there(fleet.etc) == ["robust.toml"], "here nothing is installed"
    code, text = fleet.admin("install")
    assert code == 0 and text == "127.0.0.[1-3]  same\nnothing to do\n"
    code, text = fleet.admin("uninstall")
    assert code == 0, text
    assert [there(fleet.own(last)) for last in (1, 2, 3)] == [[], [], []]


def test_dry_run_changes_nothing(fleet: Fleet) -> None:
    code, text = fleet.admin("install", "--dry-run", yes=False)
    assert code == 0 and "\n127.0.0.[1-3]  differs  " in text
    assert not there(fleet.own(1))


def test_without_a_terminal_it_wants_yes(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = fleet.admin("install", yes=False)
    assert code == 2 and "use --yes" in capsys.readouterr().err
    assert not there(fleet.own(1))


def test_only_what_differs_is_changed(fleet: Fleet) -> None:
    fleet.admin("install")
    (fleet.own(2) / "prolog").unlink()
    (fleet.own(3) / "robust.toml").write_text("# this node's own\n")
    text = f'[gate]\nspool = "{fleet.top}/spool"\ndry_run = true\n{END}\n'
    (fleet.etc / "robust.toml").write_text(text)
    code, text = fleet.admin("install")
    assert code == 0, text
    assert there(fleet.own(2)) == INSTALLED
    assert (fleet.own(3) / "robust.toml").read_text() == "# this node's own\n"
    assert there(fleet.own(3)) == [*INSTALLED, "robust.toml.new"]
    for path in (fleet.own(1) / "robust.toml", fleet.own(3) / "robust.toml.new"):
        assert "dry_run = true" in path.read_text()
    assert "=== on 127.0.0.1\n" in text and "was edited and is kept" in text


def test_a_broken_robust_toml_goes_nowhere(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    (fleet.etc / "robust.toml").write_text("[gate]\nprolog_deadline = 'long'\n")
    code, _ = fleet.admin("install")
    assert code == 2 and "prolog_deadline" in capsys.readouterr().err
    assert not there(fleet.own(1))


# ---- nodes that fail


def test_one_dead_node_stops_no_other(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "CONNECT_S", 6.0)
    with socket.create_server((MUTE, fleet.port)):  # accepts, and never says a word
        code, text = fleet.admin("install", nodes="127.0.0.[1-7]")
    assert code == 1
    assert re.search(r"^127\.0\.0\.\[1-3\]  done  ", text, re.MULTILINE)
    failed = dict(re.findall(r"^(\S+) +FAILED +(.*)$", text, re.MULTILINE))
    assert set(failed) == {STRANGER, SWAPPED, REFUSED, MUTE}
    assert "host key is not known" in failed[STRANGER]
    assert f"ssh-keyscan -p {fleet.port} {STRANGER}" in failed[STRANGER]
    assert "is not the one in known_hosts" in failed[SWAPPED]
    assert failed[REFUSED].startswith(f"no SSH answer at port {fleet.port}: Unable to connect")
    assert failed[MUTE].endswith("no SSH server answered within 6 s")
    assert [there(fleet.own(last)) for last in (1, 2, 3)] == [INSTALLED] * 3


def test_what_goes_wrong_on_the_node(fleet: Fleet) -> None:
    request = AdminRequest("uninstall", str(fleet.etc))
    reply = remote.ask("127.0.0.1", fleet.access(python="/nope/bin/python3"), request)
    assert "/nope/bin/python3" in reply.error and "do the nodes see the prefix?" in reply.error
    reply = remote.ask("127.0.0.1", fleet.access(), request._replace(etc="/dev/null/x"))
    assert not reply.error and "nothing is installed" in reply.notes[0]
    reply = remote.ask("127.0.0.1", fleet.access(identity=str(fleet.top / "other")), request)
    assert "was accepted?" in reply.error
    reply = remote.ask("no-such-node.invalid", fleet.access(), request)
    assert "no address" in reply.error or "Name or service" in reply.error


def test_a_stub_that_would_not_start_is_installed_nowhere(fleet: Fleet) -> None:
    cli_file = rooms_of(fleet.prefix) / "prolog" / "cli.py"
    text = cli_file.read_text()
    cli_file.write_text("import no_such_module\n")
    try:
        code, out = fleet.admin("install")
    finally:
        cli_file.write_text(text)
    assert code == 1 and "127.0.0.[1-3]  FAILED" in out and "no_such_module" in out
    assert [there(fleet.own(last)) for last in (1, 2, 3)] == [[], [], []]


# ---- bad input


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["install", "--nodes", "n1"], "--nodes and --ssh must be used together"),
        (["install", "--ssh"], "--nodes and --ssh must be used together"),
        (["install", "--nodes", "n[1-", "--ssh"], "n[1-"),
        (["install", "--nodes", "n[1-29999]", "--ssh"], "1 to 20000 nodes"),
        (["install", "--nodes", "n1", "--ssh", "--known-hosts", "/nope"], "/nope: No such file"),
        (["install", "--nodes", "n1", "--ssh", "--identity", "/nope"], "/nope: No such file"),
        (["install", "--nodes", "n1", "--ssh", "--port", "99999"], "not a port"),
        (["install", "--etc", "relative"], "not an absolute path"),
        (["install", "--prefix", "/nope"], "no bin/python3"),
        (["frobnicate"], "no such command: frobnicate"),
        ([], "no command; use install, uninstall or doctor"),
    ],
)
def test_bad_input(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words, io.StringIO()) == 2
    assert said in capsys.readouterr().err


# ---- known_hosts


KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIMSPv7R7gYKqFOyKoBkBQQkLVm0Y4bFFNfJ3Ho0BOVxS"
RSA_LIKE = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIB5ZfGwVOnKe4rC4JKkp9vWAjVGPdMpAwsvVLLxUdU2x"


def hashed(host: str) -> str:
    return str(paramiko.HostKeys.hash_host(host))


@pytest.mark.parametrize(
    ("text", "host", "known"),
    [
        (f"n1 {KEY}", "n1", True),
        (f"n1 {KEY}", "n2", False),
        (f"a,n1,10.0.0.1 {KEY} root@n1", "10.0.0.1", True),
        (f"[n1]:2222 {KEY}", "[n1]:2222", True),
        (f"[n1]:2222 {KEY}", "n1", False),
        (f"n* {KEY}", "n17", True),
        (f"n*,!n7 {KEY}", "n7", False),
        (f"n? {KEY}", "n17", False),
        (f"{hashed('n1')} {KEY}", "n1", True),
        (f"{hashed('n2')} {KEY}", "n1", False),
        (f"|1|x|y {KEY}", "n1", False),
        (f"# n1 {KEY}", "n1", False),
        (f"@cert-authority n1 {KEY}", "n1", False),
        (f"n1 {KEY}\n@revoked * {KEY}", "n1", False),
        (f"@revoked n9 {RSA_LIKE}\nn1 {KEY}", "n1", True),
        ("n1 ssh-ed25519 !!!", "n1", False),
        ("n1", "n1", False),
        ("", "n1", False),
    ],
)
def test_known_hosts(text: str, host: str, known: bool) -> None:
    assert bool(remote.KnownHosts([text]).keys(host)) is known


def test_known_hosts_of_several_files() -> None:
    found = remote.KnownHosts([f"n1 {KEY}\n", f"n1 {RSA_LIKE}\n"]).keys("n1")
    assert [key.get_base64() for key in found.values()] == [KEY.split()[1]], "the first counts"


def test_names() -> None:
    assert cli.nodes_of("n[1-3],s1") == ["n1", "n2", "n3", "s1"]
    for text in ("", "n[1-99999]", "n[1", "a/b"):
        with pytest.raises(ValueError):
            cli.nodes_of(text)
