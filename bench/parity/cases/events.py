# ruff: noqa: E501 - a table, a way a line
"""Ways with an event (C, E, and Slurm's): a debugger, a pause, a daemon, a link, a mount."""

from __future__ import annotations

from bench.parity import happenings as to
from bench.parity.way import ALONE, MOUNTS, TOY, Happening, Way

TRAINING = f"{TOY} --beat --steps 300 --step-time 0.1"
UNSEEN = f"{TOY} --steps 300 --step-time 0.1"
ON_SCRATCH = "python {scratch}/toy.py --steps 150 --step-time 0.1 --beat"


def _event(name: str, kind: str, tells: str, happens: Happening, **more: object) -> Way:
    given = {"program": TRAINING, "seconds": 34.0, **more}
    return Way(name=name, kind=kind, tells=tells, happens=happens, **given)  # type: ignore[arg-type]


DEBUGGERS = [
    _event("debugger_40", "C", "a debugger holds rank 0 for 40 s", to.traced(40), seconds=75),
    _event("debugger_40_rank_1", "C", "a debugger holds rank 1 for 40 s, steps not seen", to.traced(40, 1), program=UNSEEN, seconds=75),
    _event("tracer_20", "C", "a tracer follows rank 1 from call to call for 20 s", to.traced(20, 1, "run"), seconds=40),
    _event("gdb_20", "C", "gdb holds rank 1 for 20 s", to.gdb(20), seconds=60),
    _event("strace_20", "C", "strace follows rank 0 for 20 s", to.strace(20), seconds=40),
    _event("stopped_5", "C", "a person stops rank 1 for 5 s", to.stopped(5), seconds=40),
    _event("suspended_20", "C", "the job is suspended for 20 s", to.suspended(20), seconds=55),
    _event("suspended_20_unseen", "C", "the job is suspended for 20 s, steps not seen", to.suspended(20), program=UNSEEN, seconds=55),
]  # fmt: skip
OURS = [
    _event("step_daemon_stopped_20", "E", "slurmstepd, or robust-task, of a node is stopped for 20 s", to.stepd_stopped(20), seconds=40),
    _event("launcher_stopped_20", "E", "srun, or robust-srun, is stopped for 20 s", to.launcher_stopped(20), seconds=40),
]  # fmt: skip
SLURM = [
    _event("node_drained", "slurm", "an admin drains a node of the job for later", to.drained),
    _event("limit_changed", "slurm", "an admin changes the job's time limit", to.told("update", "jobid=JOB", "timelimit=10")),
    _event("slurmd_restarted", "slurm", "slurmd of a node is restarted", to.restarted("slurmd")),
    _event("slurmd_frozen_15", "slurm", "slurmd of a node stands still for 15 s", to.daemon("slurmd", 15)),
    _event("user_signal", "slurm", "scancel sends USR1, which the program handles", to.signalled("USR1"), program="python {programs}/saver.py 400", seconds=22),
    _event("usr2_batch", "slurm", "scancel sends USR2, which the program handles, while it waits 30 s", to.signalled("USR2"), program="python {programs}/saver.py 100 30", seconds=45),
    _event("outage_half_second", "slurm", "the link of a node is down for 0.5 s", to.outage(0.5)),
    _event("outage_2", "slurm", "the link of a node is down for 2 s: it is lost after 1.2 s, and its ranks are started again", to.outage(2.0), restarts=True),
    _event("slow_link", "slurm", "a link delays by 50 ms and drops frames for 10 s", to.slow_link(10), seconds=90),
]  # fmt: skip
TOGETHER = [
    _event("slurmctld_frozen_20", "slurm", "slurmctld stands still for 20 s", to.daemon("slurmctld", 20), lab=ALONE, once=True, seconds=36),
    _event("slurmctld_restarted", "slurm", "slurmctld is restarted", to.restarted("slurmctld"), lab=ALONE, once=True, seconds=36),
    _event("reconfigured", "slurm", "scontrol reconfigure", to.told("reconfigure"), lab=ALONE, once=True, seconds=36),
    _event("munged_frozen_10", "slurm", "munged stands still for 10 s", to.daemon("munged", 10), lab=ALONE, once=True, seconds=36),
    _event("outage_all_2", "slurm", "the links of both nodes are down for 2 s (a switch)", to.outage(2.0, 2), lab=ALONE, seconds=36),
    _event("standby_drained", "slurm", "the standby nodes are drained for 15 s", to.standby_drained, lab=ALONE, once=True, seconds=36),
    _event("crowd", "slurm", "sixty jobs come into the queue and go", to.crowd, lab=ALONE, once=True, seconds=36),
    _event("ends_without_slurmctld", "slurm", "slurmctld stands still for 20 s while the program ends", to.daemon("slurmctld", 20), program=f"{TOY} --beat --steps 100 --step-time 0.1", lab=ALONE, once=True, seconds=36),
]  # fmt: skip
STALLS = [
    _event("program_stalls_20", "A", "the mount with the program stalls for 20 s on all nodes", to.stalled(20), program=ON_SCRATCH, lab=MOUNTS, seconds=25),
    _event("data_stall_20", "A", "the mount with the data stalls for 20 s on all nodes", to.stalled(20), program="python {programs}/reader.py {scratch}/toy.py", lab=MOUNTS, seconds=40),
    _event("data_stall_20_one", "A", "the mount with the data stalls for 20 s on one node", to.stalled(20, 1), program="python {programs}/reader.py {scratch}/toy.py", lab=MOUNTS, seconds=40),
    _event("data_stall_60", "A", "the mount with the data stalls for 60 s on all nodes", to.stalled(60), program="python {programs}/reader.py {scratch}/toy.py", lab=MOUNTS, seconds=80),
    Way(name="standby_lacks_program", kind="D", tells="the standby nodes lack the program, which waits 30 s", program="python {scratch}/toy.py --beat --wait sleep:30:30", lab=MOUNTS, seconds=40),
    Way(name="standby_lacks_and_one_waits", kind="D", tells="the standby nodes lack the program; rank 1 waits 45 s", program="python {scratch}/toy.py --beat --wait sleep:30:45:1", lab=MOUNTS, seconds=50),
]  # fmt: skip
EVENTS = [*DEBUGGERS, *OURS, *SLURM, *TOGETHER, *STALLS]
