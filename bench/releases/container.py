"""The cell of containers: a training in an image with a Python of its own, and a rank is killed.

The image is entered by a stand-in for Pyxis (lab/containers): robust-task runs inside.
"""

from __future__ import annotations

import signal

from bench.common import REPOSITORY
from bench.recovery.cases import STEP_TIME, recovered
from bench.training.job import Training
from lab import Lab, LabError, containers


def why_not(lab: Lab) -> str:
    """Return why the lab cannot have the image and the stand-in; "" if it has them now."""
    try:
        containers.build_image()
        containers.install_pyxis(lab.spec)
    except LabError as error:
        return f"{error}"
    return ""


def killed_in_image(lab: Lab) -> float:
    """Measure from SIGKILL for a rank to the first step of all ranks. Raises BenchError."""
    training = Training.new(lab, "toy", 2)
    mounts = f"{REPOSITORY}:{REPOSITORY}:ro,{training.directory}:{training.directory}"
    image = f"--container-image={containers.build_image()} --container-mounts={mounts}"
    launch = f"exec robust-srun --robust-no-warm {image}"
    training.submit(launch, ["--no-kill", "-N2", "--ntasks-per-node=1", "-w", "n[1-2]"], STEP_TIME)
    try:
        kill = lambda: training.signal_rank(1, signal.SIGKILL)  # noqa: E731
        return recovered(training, kill, "restart")["total"]
    finally:
        training.cancel()
