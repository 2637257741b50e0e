"""The one typed door to Slurm: commands with deadlines in, immutable values or SlurmError out.

Slurm is reached by its commands (``Slurm``) or by pyslurm (``PySlurm``, a subclass). Both keep this
contract, and ``tests/robust_slurm/slurm/test_slurm_contract.py`` holds them to it:

- Every call ends by its deadline: SlurmError ``timeout``. ``shrink`` may take as long once more, to
  see what became of an order that failed.
- Where no slurmctld answers, a client of ``connect()`` raises ``unreachable`` within a second. (A
  slurmctld that answered less than a second ago is not pinged: then it may take the deadline.)
- A client newer than slurmctld, or too old for it, raises ``version`` and names its own release.
- No answer is taken from an exit code alone.
"""

from robust_slurm.slurm.door import Slurm
from robust_slurm.slurm.errors import Kind, SlurmError
from robust_slurm.slurm.model import (
    Allotted,
    Job,
    JobPlacement,
    Partition,
    SlurmNode,
    StandbyClaim,
    Step,
    job_id_for_cli,
)
from robust_slurm.slurm.run import Completed, run_command

__all__ = [
    "Allotted",
    "Completed",
    "Job",
    "JobPlacement",
    "Kind",
    "Partition",
    "Slurm",
    "SlurmError",
    "SlurmNode",
    "StandbyClaim",
    "Step",
    "job_id_for_cli",
    "run_command",
]
