"""A slurmctld alone, with nodes that have no slurmd: for what only asks and orders Slurm.

It serves 10,000 nodes in some 30 MB. Jobs are given nodes and stay CONFIGURING: no node ever
comes up. It believes every user (auth/none), and listens on the address of the host's name only.
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
    """A running slurmctld, from ``with`` to its end; ``env`` leads Slurm's clients to it."""

    def __init__(self, nodes: int, conf: str = "") -> None:
        """``conf``: more lines of slurm.conf."""
        self._dir = Path(tempfile.mkdtemp(prefix="robust-slurmctld-"))
        self._dir.chmod(0o755)  # other users read slurm.conf
        self._process: subprocess.Popen[bytes] | None = None
        self.env = {"SLURM_CONF": str(self._dir / "slurm.conf")}
        self._nodes = nodes
        self._conf = conf

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._dir, ignore_errors=True)

    def start(self) -> None:
        """Raises LabError if there is no slurmctld, or it does not answer."""
        program = shutil.which("slurmctld", path=_PLACES)
        if program is None:
            raise LabError("slurmctld is not installed (apt-get install slurmctld)")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        conf = self._dir / "slurm.conf"
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True)
        conf.write_text(
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
        log = (self._dir / "out").open("wb")
        with log:
            self._process = subprocess.Popen(
                [program, "-D", "-f", str(conf)],
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
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _answers(self) -> bool:
        asked = ["scontrol", "ping"]
        done = subprocess.run(asked, capture_output=True, text=True, env=os.environ | self.env)
        return " is UP" in done.stdout
