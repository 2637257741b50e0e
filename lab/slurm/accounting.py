"""slurmdbd in a lab's head, with a MariaDB of its own: accounts, limits and QOS are enforced.

The database has no network and asks for no password: its socket is in a directory of root's.
"""

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.errors import LabError
from lab.spec import ACCOUNT, HEAD, USER, LabSpec, root_env

PROGRAMS = ("slurmdbd", "mariadbd")
_TABLES = Path("/usr/share/mysql/mysql_system_tables.sql")
_PLUGIN = "slurm-wlm/accounting_storage_mysql.so"  # below a directory of libraries
_SOCKET = Path("/run/mysqld/mysqld.sock")  # of the head's own /run; where slurmdbd looks
_ANSWER_S = 20.0
_LINES = (  # what sacctmgr is told; the QOS "normal" is there already
    "add cluster {cluster}",
    f"add account {ACCOUNT}",
    f"add user {USER} account={ACCOUNT}",
)

Start = Callable[[str, list[str], Callable[[], bool]], int]
"""Starts a daemon: its name, its command, and a function that is true once it answers."""


def check_programs() -> None:
    """Raise LabError unless this machine has what it takes."""
    missing = [name for name in PROGRAMS if not shutil.which(name, path="/usr/sbin:/usr/bin")]
    missing += [] if _TABLES.exists() else [str(_TABLES)]
    missing += [] if any(Path("/usr/lib").glob(f"*/{_PLUGIN}")) else [Path(_PLUGIN).name]
    if missing:
        raise LabError(
            f"not installed: {', '.join(missing)}; try: "
            "apt-get install slurmdbd slurm-wlm-mysql-plugin mariadb-server-core"
        )


def slurmdbd_conf(spec: LabSpec) -> str:
    """The text of slurmdbd.conf."""
    settings = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={spec.munge_socket}",
        "DbdHost": HEAD,
        "SlurmUser": "root",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "localhost",
        "StorageUser": "root",
        "LogFile": str(spec.log("slurmdbd")),
        "PidFile": f"{spec.node_dir}/slurmdbd.pid",
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())


def start(spec: LabSpec, daemon: Start) -> dict[int, str]:
    """Start both in the head and make the lab's account; return their names by pid.

    Raises LabError.
    """
    data = spec.dir / "db"
    for directory in (data, _SOCKET.parent):
        directory.mkdir(mode=0o700)
    words = ["mariadbd", "--no-defaults", "--user=root", f"--datadir={data}"]
    words += ["--skip-grant-tables", f"--secure-file-priv={data}"]
    words += ["--innodb-use-native-aio=0", "--innodb-flush-log-at-trx-commit=0"]
    words += ["--innodb-log-file-size=8M", "--innodb-buffer-pool-size=16M"]
    _make_tables(words)
    words += ["--skip-networking", f"--socket={_SOCKET}", f"--pid-file={data}/pid"]
    first = daemon("mariadbd", words, _SOCKET.exists)
    second = daemon("slurmdbd.out", ["slurmdbd", "-D"], lambda: not _sacctmgr(spec, "show cluster"))
    for line in _LINES:
        filled = line.format(cluster=spec.name)
        if said := _sacctmgr(spec, filled):
            raise LabError(f"sacctmgr {filled}: {said}")
    return {first: "mariadbd", second: "slurmdbd"}


def _make_tables(mariadbd: Sequence[str]) -> None:
    """Create MariaDB's own tables, which slurmdbd's procedures in the database need."""
    text = "create database mysql;\nuse mysql;\nset @auth_root_socket=NULL;\n"
    text += "set @skip_auth_anonymous=1;\n" + _TABLES.read_text()
    words = [*mariadbd, "--bootstrap"]
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=_ANSWER_S)
    if done.returncode:
        raise LabError(f"mariadbd --bootstrap: {done.stderr.strip()[-500:]}")


def _sacctmgr(spec: LabSpec, line: str) -> str:
    """Run one command of sacctmgr; return its complaint, or ""."""
    words = ["sacctmgr", "-i", *line.split()]
    try:
        done = subprocess.run(
            words, env=root_env(spec), capture_output=True, text=True, timeout=_ANSWER_S
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_ANSWER_S:g} s"
    return (done.stderr or done.stdout).strip() if done.returncode else ""
