"""The cell of the plugin: `sbatch --robust` of a script with a plain srun line; a rank is killed.

It has a lab of its own: what it installs is read by every srun of the lab.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from bench.recovery.cases import STEP_TIME, recovered
from bench.training.job import Training
from health.admin import plugin
from lab import Cluster, Lab


def headers(lab: Lab) -> str:
    """Return the include directory of the lab's release; "": the host's own."""
    root = lab.spec.slurm_root
    return f"{root}/usr/include" if root else ""


def install(lab: Lab) -> None:
    """Build the plugin for the lab's release, and have its plugstack.conf and lua call it.

    Raises InstallError.
    """
    etc = str(lab.spec.dir / "robust")
    Path(plugin.directory(etc)).mkdir(parents=True)
    for file in plugin.files(etc, str(Path(sys.executable).parents[1]), headers(lab)):
        path = Path(file.path)
        path.write_bytes(file.text.encode("utf-8", "surrogateescape"))
        path.chmod(file.mode)
    slurm = lab.spec.dir / "etc"
    (slurm / "plugstack.conf").write_text(plugin.include_line(etc) + "\n")
    lua = slurm / "cli_filter.lua"
    lua.write_text(plugin.with_call(lua.name, "", etc))


def killed_under_srun(release: str) -> float:
    """Measure SIGKILL for a rank to the first step of all. Raises BenchError, InstallError."""
    conf = {"CliFilterPlugins": "lua"}
    with Cluster(nodes=2, standby=0, slurm=release, slurm_conf=conf) as lab:
        install(lab)
        training = Training.new(lab, "toy", 2)
        training.submit("exec srun", ["--robust", "-N2", "--ntasks-per-node=1"], STEP_TIME)
        try:
            kill = lambda: training.signal_rank(1, signal.SIGKILL)  # noqa: E731
            return recovered(training, kill, "restart")["total"]
        finally:
            training.cancel()
