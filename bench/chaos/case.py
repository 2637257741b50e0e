"""A case of bench.chaos, and one run of it in a lab of its own."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from bench.chaos.job import ChaosError, Job
from bench.chaos.site import epilog_of, install_epilog
from bench.chaos.verdict import Expected, Verdict, judge
from lab import Cluster, LabError

Fault = Callable[[Job], None]
RIGHT = Expected()
SETTLED = 25  # steps before the fault


def nothing(job: Job) -> None:
    """Break nothing: the program itself is the fault."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault, the training that it hits, and the right outcome.

    The lab has nodes n1-n5 and standby nodes s1 and s2; the job starts on n1 … in their order, n1
    being the batch host. `{scratch}` in `program` is a file system that stalls on command.
    """

    name: str
    broken: str
    """The fault, in one line."""
    fault: Fault = nothing
    before: Fault = nothing
    """Break something before the job is submitted."""
    expected: Expected = RIGHT
    nodes: int = 3
    per_node: int = 1
    spares: int = 0
    options: str = ""
    """Options of robust-srun."""
    python: str = "python"
    script: str = "{dir}/rank.py"
    program: str = ""
    """Options of the training program."""
    steps: int = 120
    reference: Callable[[int], float] | None = None
    """The loss of an uninterrupted run of so many steps; None: of the toy training."""
    state_on_scratch: bool = False
    at_start: bool = False
    """The fault comes with the submission, not after 25 steps."""
    warm: bool = False
    """The fault comes once all ranks would start warm."""
    met: str = ""
    """A pattern of the job's output that shows that it met the fault; without it a run is void."""
    epilog: bool = False
    """The nodes have the product's epilog: Slurm kills processes that cannot clean up any more."""
    limit: float = 90.0
    """Seconds from the fault until a job that has not ended counts as lost."""
    long: bool = False
    """True if it runs only with --long."""


class Run(NamedTuple):
    """One run: its verdict, or why there is none, and the job's output."""

    case: str
    verdict: Verdict | None
    error: str
    out: str
    seconds: float
    incidents: Sequence[Mapping[str, Any]] = ()
    """The records of robust-srun."""
    began: float = 0.0
    """Wall time of the fault."""


def run(case: Case) -> Run:
    """Bring a lab up, run the case once, and judge what it left."""
    began = time.monotonic()
    out = ""
    verdict: Verdict | None = None
    error = ""
    incidents: list[dict[str, Any]] = []
    fault_at = 0.0
    try:
        nodes = max(5, case.nodes + case.spares + 1)
        named = Cluster(nodes=nodes)  # its directory must be known for its slurm.conf
        conf = {"Epilog": str(epilog_of(named.spec.dir))} if case.epilog else {}
        name = named.spec.name
        with Cluster(name=name, nodes=nodes, standby=2, scratch=True, slurm_conf=conf) as lab:
            if case.epilog:
                install_epilog(lab.spec.dir)
            job = Job.new(lab, case.nodes * case.per_node, case.steps)
            try:
                verdict = _run(case, job)
                incidents, fault_at = job.incidents(), job.began()
            finally:
                out = job.out()
    except (ChaosError, LabError, OSError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    seconds = time.monotonic() - began
    return Run(case.name, verdict, error, out, seconds, incidents, fault_at)


def _run(case: Case, job: Job) -> Verdict:
    job.stdin = "--stdin" in case.program
    job.state_on_scratch = case.state_on_scratch
    if case.reference is not None:
        job.reference = partial(case.reference, case.steps)
    where = {"scratch": str(job.lab.scratch), "dir": str(job.dir)}
    program = f"{case.python} {case.script} --dir {job.dir} --steps {case.steps} {case.program}"
    spares = f"--robust-spares={case.spares}" if case.spares else ""
    words = f"{spares} {case.options} {program}".format(**where)
    case.before(job)
    size = [f"-N{case.nodes + case.spares}", f"--ntasks-per-node={case.per_node}"]
    job.fault_at = time.time()
    job.submit(words, size)
    if not case.at_start:
        job.wait_steps(SETTLED)
        if case.warm:
            job.wait_warm()
        job.fault_at = time.time()
    case.fault(job)
    seen = job.observe(job.wait_end(case.limit))
    if not re.search(case.met, job.out()):
        raise ChaosError(f"the job did not meet the fault: nothing says {case.met!r}")
    return judge(case.expected, seen)
