"""A slurmctld alone, with nodes that have no slurmd: for code that only queries and commands it.

It serves 10,000 nodes in some 30 MB. Jobs are given nodes and stay CONFIGURING: no node ever
comes up. It believes every user (auth/none), and listens on the address of the host's name only.
Its release is the host's own, or the one that ``ROBUST_LAB_SLURM`` names, as a lab's.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from lab.errors import LabError
from lab.slurm import releases

_START_S = 60.0
_PLACES = "/usr/sbin:/usr/local/sbin:/sbin:" + os.defpath
_CONF = """\
ClusterName=alone
SlurmctldHost={host}
SlurmctldPort={port}
CommunicationParameters=NoCtldInAddrAny
SlurmUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={dir}/state
SlurmctldPidFile={dir}/slurmctld.pid
SlurmctldLogFile={dir}/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
SlurmctldTimeout=30
SchedulerParameters=sched_interval=1,batch_sched_delay=0
GresTypes=gpu
SuspendTime=86400
PrivateData=cloud
ResumeProgram=/bin/true
SuspendProgram=/bin/true
ResumeTimeout=3600
NodeName=DEFAULT CPUs=8 RealMemory=4000 Gres=gpu:h100:4 Feature=fast,big State=CLOUD
NodeName=c[1-{nodes}] NodeHostname=nobody NodeAddr=127.0.0.1 Port=[20001-{last_port}]
PartitionName=train Nodes=c[1-{nodes}] Default=YES State=UP OverSubscribe=EXCLUSIVE
PartitionName=spare Nodes=c[1-{few}] State=UP
"""


class Controller:
    """A running slurmctld, from ``with`` to its end; ``env`` leads Slurm's clients to it.

    Meanwhile the PATH of this process begins with the commands of its release.
    """

    def __init__(self, nodes: int, conf: str = "", slurm: str = "") -> None:
        """``conf``: more lines of slurm.conf; ``slurm``: the release. Raises LabError."""
        self.release = releases.find(releases.asked(slurm))
        self._dir = Path(tempfile.mkdtemp(prefix="robust-slurmctld-"))
        self._dir.chmod(0o755)  # other users read slurm.conf
        self._process: subprocess.Popen[bytes] | None = None
        self._path = os.environ.get("PATH", os.defpath)
        self._nodes = nodes
        self._conf = conf
        self._text = ""
        self.commands = self._commands(self.release)
        self.env = self._env(self.release)

    def __enter__(self) -> Self:
        try:
            os.environ["PATH"] = self.env["PATH"]
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        os.environ["PATH"] = self._path
        shutil.rmtree(self._dir, ignore_errors=True)

    def clients(self, release: releases.Release) -> dict[str, str]:
        """Return an environment that leads the commands of any release to this slurmctld."""
        env = self._env(release)
        Path(env["SLURM_CONF"]).write_text(self._text + _plugins(release))
        return env

    def _own(self, release: releases.Release) -> Path:
        """Return a directory for a release: its slurm.conf names that of its plugins."""
        made = self._dir / (release.name or "host")
        made.mkdir(mode=0o755, exist_ok=True)
        return made

    def _commands(self, release: releases.Release) -> str:
        """Return a directory with the release's programs; "": the host's, in their places."""
        if release.root is None:
            return ""
        made = self._own(release) / "bin"
        made.mkdir(mode=0o755, exist_ok=True)
        for path, program in releases.programs_of(release.root).items():
            link = made / Path(path).name
            if not link.is_symlink():
                link.symlink_to(program)
        return str(made)

    def _env(self, release: releases.Release) -> dict[str, str]:
        commands = self._commands(release)
        path = f"{commands}:{self._path}" if commands else self._path
        return {"SLURM_CONF": str(self._own(release) / "slurm.conf"), "PATH": path}

    def start(self) -> None:
        """Start slurmctld. Raises LabError if it is not installed or does not answer."""
        program = shutil.which("slurmctld", path=self.commands or _PLACES)
        if program is None:
            raise LabError("slurmctld is not installed (apt-get install slurmctld)")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True)
        self._text = (
            _CONF.format(
                host=socket.gethostname().partition(".")[0],
                port=port,
                user=user.stdout.strip(),
                dir=self._dir,
                nodes=self._nodes,
                few=min(2, self._nodes),
                last_port=20_000 + self._nodes,  # nobody is there: refused without a look-up
            )
            + self._conf
        )
        conf = self.clients(self.release)["SLURM_CONF"]
        log = (self._dir / "out").open("wb")
        with log:
            self._process = subprocess.Popen(
                [program, "-D", "-f", conf],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self.env,
                start_new_session=True,
            )
        until = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                text = (self._dir / "out").read_text(errors="replace")[-600:]
                raise LabError(f"slurmctld does not answer: {text}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End slurmctld at once."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _answers(self) -> bool:
        asked = ["scontrol", "ping"]
        done = subprocess.run(asked, capture_output=True, text=True, env=os.environ | self.env)
        return " is UP" in done.stdout


def _plugins(release: releases.Release) -> str:
    if release.root is None:
        return ""
    return f"PluginDir={releases.plugin_dir(release.root)}\n"
