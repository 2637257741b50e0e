"""Options of robust-task, the shim in each task slot, which robust-srun puts into its argv."""

from __future__ import annotations

import msgspec

from robust_slurm.settings import Config

STDIN_KEPT = 16 << 20  # bytes of its input that are kept for each rank's next start


class OutputPlan(msgspec.Struct, frozen=True):
    """Set by robust-srun, carried to the shim in its argv.

    ``out``/``err``: a file pattern for the shim to open, or "" to leave the stream with srun.
    ``only_out``/``only_err``: only this rank's stream is kept (``--output=3``).
    """

    label: bool = False
    unbuffered: bool = False
    out: str = ""
    err: str = ""
    append: bool = False
    only_out: int | None = None
    only_err: int | None = None


class TaskOptions(msgspec.Struct, frozen=True):
    """The shim's options, as JSON in its argv."""

    output: OutputPlan = OutputPlan()
    auto: bool = True
    regex: str = ""
    inherit: bool = False  # --pty: the rank gets the terminal itself
    records: str = ""  # the job's directory in the state directory; empty: it has none
    standby_partition: str = ""
    requeue: bool = False
    size: dict[str, str] = {}  # of the job, as robust-srun's environment has it (resubmit.SIZE)
    checkpoint: bool = True
    checkpoint_bandwidth: float = 0.0  # bytes/s for a rank's replica; 0: no limit
    warm: bool = True
    warm_packages: tuple[str, ...] = ()
    outage_wait: float = Config().outage_wait
    slurm_wait: float = 0.0  # s that the last duty waits for a Slurm that is away
    work_limit: float = 60.0  # s over the grace for a rank that writes in its handler of SIGTERM
    suspend_limit: float = Config().suspend_limit
    task_start_limit: float = Config().task_start_limit
    checkpoint_interface: str = ""  # for snapshots between nodes; empty: the supervisor's
    restarts: int = 0  # of the job, when this step began; a standby node cannot know it
    alone: bool = False  # observe: a node's shims end when its ranks have, and change no command
    kill_on_bad: bool = (
        False  # alone: also when one rank has ended badly, as srun is to end the step
    )
