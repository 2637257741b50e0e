"""A lab to work with: `Lab(name)` for one that is up, `Cluster(...)` for one of your own."""

import itertools
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from lab import host
from lab.errors import LabError
from lab.slurm import records, releases
from lab.slurm.logs import complaints
from lab.spec import HEAD, ROOT, ROOTS, UID, USER, LabSpec, address, check_name, user_env
from lab.verbs.breakage import Breakage
from lab.verbs.disruption import Disruption

_ENTER = Path(__file__).with_name("enter.py")
_AGENT = Path(__file__).with_name("kernel") / "agent.py"
_POLL_S = 0.15
_SLURM_S = 15.0  # a command to slurmctld; itself gives up after 9-10 s
_READY_S = 30.0
_numbers = itertools.count(1)


class Lab(Breakage, Disruption):
    """A lab that is up. Every method raises LabError with a text for the user."""

    def __init__(self, name: str) -> None:
        check_name(name)
        try:
            raw = (ROOT / name / "lab.json").read_bytes()
        except FileNotFoundError:
            known = " ".join(host.lab_names()) or "none"
            raise LabError(f"no lab {name!r} is up; there are: {known}") from None
        self.spec = msgspec.json.decode(raw, type=LabSpec)

    user = USER
    uid = UID

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def shared(self) -> Path:
        """A directory of the user, the same path on the host and in every node."""
        return self.spec.shared

    # -- running things ---------------------------------------------------------------------

    def entry(
        self, node: str, argv: Sequence[str], *, user: bool = True, cwd: str | Path | None = None
    ) -> list[str]:
        """The command line that runs `argv` in `node` (to be given `environ()`)."""
        if node not in self.spec.all_names:
            raise LabError(
                f"no node {node!r} in lab {self.name}; there are: {' '.join(self.spec.all_names)}"
            )
        where = str(cwd) if cwd is not None else str(self.shared) if user else "/"
        uid = str(UID if user else 0)
        program, place = str(_ENTER), node
        if self.spec.kernel and node != HEAD:
            program, place = str(_AGENT), address(node)
        enter = [sys.executable, "-I", "-S", program, str(self.spec.control_socket)]
        return [*enter, place, uid, where, "--", *argv]

    def environ(self, *, user: bool = True, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a process entered by hand: clean, plus `env`."""
        found = user_env(self.spec, [Path(sys.prefix) / "bin"])
        if not user:
            found |= ROOTS
        return found | dict(env or {})

    def popen(
        self,
        node: str,
        argv: Sequence[str],
        *,
        user: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        **popen: Any,
    ) -> "subprocess.Popen[Any]":
        """Start `argv` in `node`, as the lab's user or as root; `popen` is for subprocess.Popen.

        Signals sent to the returned process reach the command, and it ends as the command ends.
        """
        return subprocess.Popen(
            self.entry(node, argv, user=user, cwd=cwd),
            env=self.environ(user=user, env=env),
            **popen,
        )

    def exec(
        self,
        node: str,
        argv: Sequence[str],
        *,
        user: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        input: str | None = None,
        timeout: float = 60.0,
        check: bool = False,
    ) -> "subprocess.CompletedProcess[str]":
        """Run `argv` in `node` and return its text output and exit code (negative: a signal).

        Raises subprocess.TimeoutExpired after `timeout` seconds; with `check`, LabError with the
        command's stderr when it fails.
        """
        result = subprocess.run(
            self.entry(node, argv, user=user, cwd=cwd),
            env=self.environ(user=user, env=env),
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check and result.returncode != 0:
            raise LabError(
                f"{node}: {' '.join(argv)}: exit code {result.returncode}: "
                f"{(result.stderr or result.stdout).strip()[-2000:]}"
            )
        return result

    # -- Slurm ------------------------------------------------------------------------------

    def sbatch(self, script: str, args: Sequence[str] = (), *, user: bool = True) -> int:
        """Submit a batch script's text from the login node, as user or root; return the job id."""
        argv = ["sbatch", "--parsable", *args]
        done = self.exec(HEAD, argv, input=script, check=True, user=user)
        return int(done.stdout.strip().split(";")[0])

    def job(self, job: int) -> dict[str, str]:
        """`scontrol show job` as a dict; LabError if slurmctld knows no such job."""
        done = self.exec(HEAD, ["scontrol", "show", "job", str(job)], timeout=_SLURM_S, check=True)
        return records.parse_record(done.stdout)

    def wait_job(
        self, job: int, states: str | Collection[str], timeout: float = 60.0
    ) -> dict[str, str]:
        """Wait until the job's state is one of `states`; return its record."""
        wanted = {states} if isinstance(states, str) else set(states)
        deadline = time.monotonic() + timeout
        while True:
            record = self.job(job)
            if record.get("JobState") in wanted:
                return record
            if time.monotonic() > deadline:
                raise LabError(
                    f"job {job} is {record.get('JobState')} (reason {record.get('Reason')}), "
                    f"not {'/'.join(sorted(wanted))}, after {timeout:.0f} s"
                )
            time.sleep(_POLL_S)

    def node_records(self) -> dict[str, dict[str, str]]:
        """`scontrol show nodes`, each node's record by its name (times are UTC)."""
        argv = ["scontrol", "show", "nodes", "-o"]
        limit = _SLURM_S * self.spec.patience
        done = self.exec(HEAD, argv, env={"TZ": "UTC"}, timeout=limit, check=True)
        return records.parse_nodes(done.stdout)

    def nodes(self) -> dict[str, frozenset[str]]:
        """Each node's Slurm state as a set of flags, by name."""
        return {n: records.parse_state(r["State"]) for n, r in self.node_records().items()}

    def wait_ready(self, timeout: float = _READY_S) -> None:
        """Wait until every node is registered with slurmctld; a large lab gets more time."""
        limit = timeout * self.spec.patience
        self._wait_usable(self.spec.compute_names, limit, resume=False)

    def _wait_usable(
        self, names: Sequence[str], timeout: float, *, resume: bool, began: float = 0.0
    ) -> None:
        # `began`: only a slurmd started since then counts, not the one that slurmctld remembers.
        deadline = time.monotonic() + timeout
        while True:
            found = self.node_records()
            bad = {
                n: found[n].get("State", "?") for n in names if not records.usable(found[n], began)
            }
            if not bad:
                return
            for name in bad if resume else ():
                if records.wants_resume(found[name]):
                    update = ["scontrol", "update", f"nodename={name}", "state=resume"]
                    self.exec(HEAD, update, user=False, timeout=_SLURM_S)
            if time.monotonic() > deadline:
                raise LabError(
                    f"after {timeout:.0f} s Slurm still has {bad}; logs in {self.spec.dir}/log"
                    f"{complaints(self.spec)}"
                )
            time.sleep(_POLL_S * self.spec.patience)  # rarely: polling slows the starting nodes

    def _wait_controller(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.exec(HEAD, ["scontrol", "ping"], timeout=_SLURM_S).returncode != 0:
            if time.monotonic() > deadline:
                raise LabError(f"slurmctld does not answer after {timeout:.0f} s")
            time.sleep(_POLL_S)

    # -- faults -----------------------------------------------------------------------------

    def ask(self, op: str, **more: Any) -> dict[str, Any]:
        """Send one request to the lab's keeper and return its answer."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.settimeout(_READY_S)
            try:
                link.connect(str(self.spec.control_socket))
                link.send(json.dumps({"op": op, **more}).encode())
                raw = link.recv(1 << 20)
            except OSError as error:
                raise LabError(f"lab {self.name} does not answer: {error}") from error
        if not raw:
            raise LabError(f"lab {self.name} ended")
        reply: dict[str, Any] = json.loads(raw)
        if "error" in reply:
            raise LabError(reply["error"])
        return reply

    def crash(self, node: str) -> float:
        """Take the node's link down, kill all on it; return the wall-clock time of just before."""
        return float(self.ask("crash", node=node)["time"])

    def hang(self, node: str) -> float:
        """Stop all processes of the node (SIGSTOP); return the wall-clock time of just before."""
        return float(self.ask("hang", node=node)["time"])

    def hang_rank(self, job: int | str, rank: int) -> float:
        """Stop the processes of a job's rank; return the wall-clock time of just before."""
        return float(self.ask("hang_rank", job=str(job), rank=str(rank))["time"])

    def partition(self, node: str) -> float:
        """Take the node's link down, no more; return the wall-clock time of just before."""
        return float(self.ask("partition", node=node)["time"])

    def slow(
        self, node: str, rate: str = "", *, delay_ms: float = 0.0, loss_percent: float = 0.0
    ) -> float:
        """Limit what goes to the node (tc's "100mbit"), delay and drop frames in both directions.

        Return the wall-clock time of just before.
        """
        much = {"rate": rate, "delay": delay_ms / 1000, "loss": loss_percent / 100}
        return float(self.ask("slow", node=node, **much)["time"])

    def heal(self, node: str, timeout: float = _READY_S) -> None:
        """Undo the node's faults and wait until Slurm can use it (a drained node stays drained)."""
        died = self.ask("state")["nodes"].get(node, {}).get("died", 0.0)
        # slurmctld knows a reboot by a boot time, in whole seconds and with the uptime rounded up,
        # that is later than the node's last answer, which it may note a second late. If it missed
        # the reboot it would keep the jobs that died there for a minute or more.
        time.sleep(max(0.0, min(4.0, math.floor(died) + 4 - time.time())))
        reply = self.ask("heal", node=node)
        for name in reply["stopped"]:
            self.daemon(node, name, "start")
        if node == HEAD:
            self._wait_controller(timeout)
            return
        began = float(reply["time"]) if reply["was"] == "crashed" else 0.0
        self._wait_usable([node], timeout, resume=True, began=began)

    def faults(self) -> dict[str, str]:
        """Return each node's fault: "up" (none), "crashed", "hung", "rank-hung", "cut", "slow".

        Also "paused", "slurmd-frozen", "slurmd-stopped". What is broken in its hardware is named
        too: "gpu3", "nvml", "mlx5_0", "full:/tmp", "stale:/path", "stalled:/path".
        """
        return {name: str(node["state"]) for name, node in self.ask("state")["nodes"].items()}


class Cluster(Lab):
    """A lab for the time of a `with` block; gone with it, or with this process however it ends."""

    def __init__(
        self,
        name: str | None = None,
        nodes: int = 4,
        standby: int = 1,
        gpus: int = 0,
        slurm_conf: Mapping[str, str | int] | None = None,
        visible: Sequence[str | Path] = (),
        cpus: int = 8,
        scratch: bool = False,
        switches: Sequence[str] = (),
        accounting: bool = False,
        router: bool = False,
        kernel: bool = False,
        slurm: str = "",
    ) -> None:
        """`slurm_conf` overrides settings; `visible`: more paths that the user must reach.

        `switches`: the nodes under each leaf switch, as Slurm writes them ("n[1-2],s1").
        `scratch`: a mount in every node, at the property of that name, for `stale_mount`.
        `accounting`: a slurmdbd in the head; the user is in the account `lab`.
        `kernel`: every node has a kernel of its own: real cgroups (few nodes, no GPUs).
        `router`: the network of a large lab, for a small one.
        `slurm`: the release, by default the environment's ROBUST_LAB_SLURM or the host's own.
        """
        extra = [str(Path(p).resolve()) for p in visible]
        self.spec = LabSpec(
            name=name or f"t{os.getpid()}-{next(_numbers)}",
            nodes=nodes,
            standby=standby,
            gpus=gpus,
            cpus=cpus,
            scratch=scratch,
            slurm_conf={key: str(value) for key, value in (slurm_conf or {}).items()},
            switches=tuple(switches),
            accounting=accounting,
            router=router,
            kernel=kernel,
            slurm=releases.asked(slurm),
            visible=tuple(dict.fromkeys([*host.default_visible(), *extra])),
        )

    def __enter__(self) -> Self:
        self.spec = host.bring_up(self.spec, owner=os.getpid())
        try:
            self.wait_ready()
        except BaseException:
            host.take_down(self.spec.name)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        host.take_down(self.spec.name)
