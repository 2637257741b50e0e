"""Faults that a lab makes on several nodes at once and on Slurm's daemons, as methods of `Lab`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from lab.errors import LabError
from lab.spec import LabSpec
from robust_slurm import hostlist

Nodes = str | Sequence[str]
"""Nodes as Slurm writes them ("n1", "n[1-3],s1"), or a list of names."""


def expand(nodes: Nodes) -> list[str]:
    """Return the names that `nodes` stands for."""
    return hostlist.expand(nodes) if isinstance(nodes, str) else list(nodes)


class Disruption(ABC):
    """Faults that many nodes share. All return the wall-clock time of just before the fault."""

    spec: LabSpec

    @abstractmethod
    def ask(self, op: str, **more: Any) -> dict[str, Any]:
        """The keeper's answer to one request."""

    @abstractmethod
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
    ) -> "CompletedProcess[str]":
        """Run a command in a node."""

    def _many(self, op: str, nodes: Nodes, seconds: float = 0.0, path: str = "") -> float:
        asked = {"nodes": expand(nodes), "seconds": seconds, "path": path}
        return float(self.ask(op, **asked)["time"])

    def stall(self, nodes: Nodes, path: str | Path | None = None) -> float:
        """Stop the server of the nodes' mount at `path` (default: the scratch).

        Whoever uses the mount waits in D state, until `resume`.
        """
        return self._many("stall", nodes, path=str(path or self.spec.scratch_dir))

    def resume(self, nodes: Nodes, path: str | Path | None = None) -> float:
        """Let a stalled mount go on: every request that waited is answered, none fails."""
        return self._many("resume", nodes, path=str(path or self.spec.scratch_dir))

    def outage(self, nodes: Nodes, seconds: float = 0.0) -> float:
        """Take the links of the nodes down at once, for `seconds` or until `reconnect`."""
        return self._many("outage", nodes, seconds)

    def pause(self, nodes: Nodes, seconds: float = 0.0) -> float:
        """Pause the nodes as a hypervisor does, for `seconds` or until `reconnect`.

        All processes stop and, unlike after `hang`, the kernel answers nothing either.
        """
        return self._many("pause", nodes, seconds)

    def reconnect(self, nodes: Nodes) -> float:
        """End an outage or a pause of the nodes at once; unlike `heal`, do not wait for Slurm."""
        return self._many("reconnect", nodes)

    def daemon(self, node: str, name: str, action: str) -> float:
        """Break or mend a daemon: slurmd of a node, slurmctld or munged (all nodes') of the head.

        `action`: freeze (SIGSTOP), thaw, stop (SIGTERM, until it has ended), start.
        """
        if action != "start":
            return float(self.ask("daemon", node=node, daemon=name, action=action)["time"])
        running = self.exec(node, ["pgrep", "-x", name], user=False)
        if running.returncode == 0:
            raise LabError(f"{name} runs on {node} already")
        started = self.exec(node, self._daemon_argv(node, name), user=False, check=True)
        assert started.returncode == 0
        return float(self.ask("daemon", node=node, daemon=name, action="started")["time"])

    def _daemon_argv(self, node: str, name: str) -> list[str]:
        """Return the command line that starts a daemon in the background."""
        spec = self.spec
        return {
            "slurmd": ["slurmd", "-N", node],
            "slurmctld": ["slurmctld"],
            "munged": [
                *("munged", f"--socket={spec.munge_socket}", "--num-threads=2"),
                *(f"--key-file={spec.dir}/etc/munge.key", f"--log-file={spec.log('munged')}"),
                *(
                    f"--seed-file={spec.node_dir}/munge.seed",
                    f"--pid-file={spec.node_dir}/munged.pid",
                ),
            ],
        }[name]
