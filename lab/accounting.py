"""slurmdbd in a lab's head, with a MariaDB of its own: accounts, limits and QOS are enforced.

The database asks for no password: nobody but the lab's processes reaches its loopback.
"""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from lab.errors import LabError
from lab.spec import ACCOUNT, HEAD, USER, LabSpec, user_env

PROGRAMS = ("slurmdbd", "mariadbd")
_TABLES = Path("/usr/share/mysql/mysql_system_tables.sql")
_LINES = (  # what sacctmgr is told; the QOS "normal" is there already
    "add cluster {cluster}",
    f"add account {ACCOUNT}",
    f"add user {USER} account={ACCOUNT}",
)

Start = Callable[[str, list[str], Callable[[], bool]], int]
"""Of a daemon: its name, its words, and whether it answers by now."""


def check_programs() -> None:
    """Raise LabError unless this machine has what it takes."""
    missing = [name for name in PROGRAMS if not shutil.which(name, path="/usr/sbin:/usr/bin")]
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
        "StorageHost": "127.0.0.1",
        "StorageUser": "root",
        "LogFile": str(spec.log("slurmdbd")),
        "PidFile": f"{spec.node_dir}/slurmdbd.pid",
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())


def start(spec: LabSpec, daemon: Start) -> dict[int, str]:
    """Start both in the head, and make the lab's account; their names by pid."""
    data = spec.dir / "db"
    data.mkdir(mode=0o700)
    words = ["mariadbd", "--no-defaults", "--user=root", f"--datadir={data}"]
    words += ["--skip-grant-tables", "--innodb-use-native-aio=0", "--innodb-log-file-size=8M"]
    words += ["--innodb-buffer-pool-size=16M", "--innodb-flush-log-at-trx-commit=0"]
    # slurmdbd has procedures in the database: they need MariaDB's own tables.
    text = "create database mysql;\nuse mysql;\nset @auth_root_socket=NULL;\n"
    text += "set @skip_auth_anonymous=1;\n" + _TABLES.read_text()
    made = subprocess.run(
        [*words, "--bootstrap"], input=text, capture_output=True, text=True, timeout=20
    )
    if made.returncode:
        raise LabError(f"mariadbd --bootstrap: {made.stderr.strip()[-500:]}")
    words += [f"--socket={data}/socket", f"--pid-file={data}/pid", "--bind-address=127.0.0.1"]
    first = daemon("mariadbd", [*words, "--skip-name-resolve"], (data / "socket").exists)
    second = daemon("slurmdbd.out", ["slurmdbd", "-D"], lambda: not _sacctmgr(spec, "show cluster"))
    for line in _LINES:
        if said := _sacctmgr(spec, line.format(cluster=spec.name)):
            raise LabError(f"sacctmgr {line}: {said}")
    return {first: "mariadbd", second: "slurmdbd"}


def _sacctmgr(spec: LabSpec, line: str) -> str:
    """Have it done; what it complains about, or ""."""
    env = user_env(spec, []) | {"HOME": "/root", "USER": "root", "LOGNAME": "root"}
    words = ["sacctmgr", "-i", *line.split()]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=20)
    return (done.stderr or done.stdout).strip() if done.returncode else ""
