"""Every setting of robust-slurm, in one table, and the order that some of them must keep."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

AFTER_SUPERVISOR = 5.0  # s that agents wait longer than the supervisor, so that it decides first
SHOWN_STALE = 30.0  # s without a roster after which robust-status calls a job silent


class ConfigError(ValueError):
    """A setting that cannot be used; the text says where it came from and what is allowed."""


def _setting(
    default: Any,
    help_: str,
    *,
    unit: str = "",
    choices: tuple[str, ...] = (),
    minimum: float = 0,
    off: str = "",
) -> Any:
    """``off``: what ``--robust-no-…`` does, for a switch that is on by default."""
    known = {"help": help_, "unit": unit, "choices": choices, "minimum": minimum, "off": off}
    return field(default=default, metadata=known)


@dataclass(frozen=True, slots=True)
class Config:
    """All settings with their defaults. Times are seconds."""

    mode: str = _setting(
        "full",
        "full: recover from faults; observe: only detect and report them, and touch nothing; off: "
        "run plain srun",
        choices=("full", "observe", "off"),
    )
    state_dir: Path = _setting(
        Path("~/.robust-slurm"), "directory on a file system that all nodes share"
    )
    signatures_file: str = _setting(
        "",
        "TOML file of the site's failure signatures, tried before the built-in ones; empty: none",
    )
    code: str = _setting(
        "",
        "run from an immutable snapshot of this directory, which robust-update can replace while "
        "the job runs; empty: run the files as they are",
    )
    code_store: str = _setting(
        "",
        "directory on a file system that all nodes share, for the snapshots of code; empty: the "
        "job's record directory in state_dir",
    )
    code_exclude: str = _setting(
        "", "paths in the code's directory that are not copied and stay live (runs,data)"
    )
    code_limit: float = _setting(1024.0, "largest snapshot of code", unit="MB", minimum=1)
    code_keep: float = _setting(
        14.0, "how long the snapshots of a job's code stay after its end", unit="days", minimum=1
    )
    code_trial: float = _setting(
        600.0, "time after an update of code in which a failure of the program undoes it", unit="s"
    )
    slurm_backend: str = _setting(
        "auto",
        "how robust-status and robust-admin doctor reach Slurm: by its commands, or by the Python "
        "package pyslurm; auto: by pyslurm where it is installed and fits",
        choices=("auto", "commands", "pyslurm"),
    )
    spares: int = _setting(0, "nodes of the allocation that stay idle to replace a lost node")
    standby_partition: str = _setting(
        "standby", "partition whose idle nodes replace lost nodes; empty: do not use standby nodes"
    )
    lease_partition: str = _setting(
        "lease",
        "partition in which an idle standby node waits warm for a job, until another needs it; "
        "empty: lease none",
    )
    standby_wait: float = _setting(30.0, "how long a recovery waits for a standby node", unit="s")
    shrink_wait: float = _setting(5.0, "standby_wait where min_nodes allows fewer", unit="s")
    min_nodes: int = _setting(
        0, "go on with as few nodes as this if none replaces a lost one; 0: never", unit="nodes"
    )
    slurm_wait: float = _setting(
        900.0, "how long a recovery waits for slurmctld or munge to return", unit="s"
    )
    requeue: str = _setting(
        "auto",
        "requeue the job without the bad nodes if no node can replace them",
        choices=("auto", "never"),
    )
    requeue_on: str = _setting(
        "",
        "signals (USR1,USR2,TERM) after which the job is requeued once its ranks have ended, with "
        "their last step on disk; empty: none",
    )
    on_incident: str = _setting("", "command to run when an incident ends; empty: none")
    site_on_incident: str = _setting("", "the site's own on_incident: both run")
    early_restart: bool = _setting(
        True,
        "restart a program that fails in its first minute before any step is seen",
        off="let a program that fails in its first minute, before any step is seen and with no "
        "node to blame, end as under srun: the default in jobs of sbatch --robust",
    )
    max_restarts: int = _setting(3, "recoveries in a row without progress before giving up")
    drain: str = _setting(
        "never",
        "never: only report a bad node; direct: drain it at once (needs operator rights)",
        choices=("never", "direct"),
    )
    rank_env: bool = _setting(
        True,
        "set RANK, WORLD_SIZE, MASTER_ADDR and the like; off: independent programs, no restarts",
        off="start independent programs: no RANK, WORLD_SIZE or MASTER_ADDR, no restarts; a task "
        "that fails leaves the others running",
    )
    auto: bool = _setting(
        True,
        "detect steps through torch's optimizer hook, without code change",
        off="do not detect steps through torch's optimizer hook",
    )
    progress_regex: str = _setting(
        "", "detect steps in the ranks' output: the group 'step', or the first group, is the number"
    )
    hang: bool = _setting(True, "detect hangs", off="do not detect hangs")
    hang_floor: float = _setting(
        10.0, "least time without a step after which the ranks are inspected", unit="s", minimum=0.1
    )
    hang_limit: float = _setting(
        300.0,
        "least time without a step and without a sign of work (CPU, I/O, sockets, memory, child "
        "processes) after which a job counts as hung; longer where it has got over a longer wait, "
        "and hang_floor at least",
        unit="s",
        minimum=0.1,
    )
    busy_limit: float = _setting(
        7200.0, "hang_limit of a job whose ranks show signs of work", unit="s", minimum=0.1
    )
    start_limit: float = _setting(
        1800.0,
        "time limit for start-up and the first steps, and for a phase() not seen before",
        unit="s",
    )
    slow: str = _setting(
        "warn",
        "warn: when steps stay slower than before, name the rank that the others wait for; "
        "replace: also evict its node if it is hot, throttled or has a degraded link, and a spare "
        "is idle; ignore: do not look",
        choices=("warn", "replace", "ignore"),
    )
    slow_after: float = _setting(
        60.0,
        "how long steps must take 1.3 times as long as before until the ranks are looked at",
        unit="s",
        minimum=1,
    )
    nan: str = _setting(
        "recover",
        "recover: resume from before a loss that is not finite; ignore: do nothing",
        choices=("recover", "ignore"),
    )
    spike: str = _setting(
        "warn",
        "warn of a loss or gradient norm that stays above 5 times its median, or ignore it",
        choices=("warn", "ignore"),
    )
    stop_tests: float = _setting(
        60.0,
        "time limit for tests of the machines while the ranks are down: after a NaN, or from the "
        "second crash or hang in a row without progress, if no node is known to be the cause; "
        "0: no tests",
        unit="s",
    )
    test_python: str = _setting(
        "", "python with torch for stop_tests on the nodes; empty: robust-task's"
    )
    replay: int = _setting(
        0,
        "if no machine is proven faulty, replay this many steps in small groups of nodes to find "
        "the faulty one (the program must honor ROBUST_REPLAY); 0: never",
        unit="steps",
    )
    replay_limit: float = _setting(
        600.0, "time limit for one round of replays, start-up included", unit="s", minimum=1
    )
    replay_rounds: int = _setting(
        2, "stop replaying after this many rounds in a row without a failure", minimum=1
    )
    replay_fixed: bool = _setting(
        False, "compare the groups' losses: the program gives every group the same data and weights"
    )
    outage_wait: float = _setting(
        10.0,
        "how long to wait for nodes that become unreachable together before they are replaced; "
        "nodes wait 5 s longer for an unreachable batch host",
        unit="s",
    )
    stall_limit: float = _setting(
        600.0,
        "how long to wait for a stalled shared file system, or for silent nodes whose kernels "
        "answer, before the nodes are replaced",
        unit="s",
    )
    mute_limit: float = _setting(
        30.0,
        "how long a node whose kernel answers may be silent, and the job without a step, until it "
        "is lost (or three times the slowest step, if longer); where no steps are seen stall_limit "
        "applies",
        unit="s",
        minimum=1,
    )
    suspend_limit: float = _setting(
        600.0,
        "how long the ranks go on without robust-srun, if its host answers and it does not",
        unit="s",
        minimum=1,
    )
    task_start_limit: float = _setting(
        60.0,
        "how long the step waits for all nodes once the first one has reported, if spares can "
        "stand in for the others; without spares it waits on, as srun does; a node waits half as "
        "long for its own tasks",
        unit="s",
        minimum=1,
    )
    launch_limit: float = _setting(
        300.0,
        "time for a node to start its ranks; a single node that takes longer is replaced, several "
        "are waited for until stall_limit",
        unit="s",
        minimum=1,
    )
    standby_start_limit: float = _setting(
        5.0, "time for robust-task to report from a standby node", unit="s", minimum=0.1
    )
    stop_grace: float = _setting(1.0, "time between SIGTERM and SIGKILL for a rank", unit="s")
    stop_work_limit: float = _setting(
        60.0,
        "time limit after stop_grace for a rank that is writing a file in its SIGTERM handler",
        unit="s",
    )
    stop_margin: float = _setting(
        12.0,
        "time beyond stop_grace and stop_work_limit until a node that has not ended its ranks is "
        "lost; 10 s of it are for processes that survive SIGKILL",
        unit="s",
        minimum=11,
    )
    rejoin_limit: float = _setting(
        2.0,
        "time in which a rank in resilient() must leave its collective, or it is restarted, too; "
        "0: restart all ranks",
        unit="s",
    )
    roster_interval: float = _setting(
        2.0, "time between two writes of the state for robust-status", unit="s", minimum=0.1
    )
    interval: float = _setting(
        0.0, "time between a node's reports; 0: 0.25 s, above 64 nodes 0.5, above 256 1", unit="s"
    )
    checkpoint: bool = _setting(
        True,
        "keep a Checkpointer's snapshots in memory, with replicas on other nodes",
        off="do not keep a Checkpointer's snapshots in memory",
    )
    checkpoint_dir: str = _setting(
        "", "shared directory for durable checkpoints; empty: the script's, or none"
    )
    checkpoint_every: int = _setting(
        0, "write a durable checkpoint every this many steps; 0: by time only", unit="steps"
    )
    checkpoint_minutes: float = _setting(
        10.0, "write a durable checkpoint every this many minutes; 0: by steps only", unit="min"
    )
    checkpoint_keep: int = _setting(2, "number of durable checkpoints to keep", minimum=1)
    checkpoint_list_limit: float = _setting(
        5.0,
        "time for the shared file system to list the durable checkpoints at a recovery",
        unit="s",
        minimum=0.1,
    )
    checkpoint_bandwidth: float = _setting(
        0.0, "bandwidth limit for one rank's replica; 0: no limit", unit="MB/s"
    )
    checkpoint_interface: str = _setting(
        "", "interface for snapshots between nodes, such as ib0; empty: that of all messages"
    )
    checkpoint_overhead: float = _setting(
        3.0,
        "share of the training's time that snapshots in memory may cost; beyond it only every n-th "
        "step is saved; 0: save every step at any cost",
        unit="%",
    )
    warm: bool = _setting(
        True,
        "pre-import the ranks' modules for the next start",
        off="do not pre-import the ranks' modules",
    )
    warm_packages: str = _setting("", "your own packages that may be pre-imported, too (a,b)")
    place: bool = _setting(
        False, "order the ranks by the network: groups that communicate go under one switch"
    )
    mesh: str = _setting(
        "", "the parallel groups, slowest first (pp=2,dp=8,tp=8), if no Checkpointer has named them"
    )
    place_alpha: float = _setting(
        0.3, "weight of data-parallel groups, 0 (pipelines only) to 1; above 0.5 is unusual"
    )
    task_python: str = _setting(
        "", "python that runs robust-task on the nodes; empty: that of robust-srun"
    )
    verbose: bool = _setting(False, "print every decision on stderr, not only recoveries")
    log_level: str = _setting(
        "info",
        "least severe level that goes to robust-srun.log in the job's record directory",
        choices=("debug", "info", "warning", "error"),
    )


FIELDS = dict(Config.__dataclass_fields__)


def contradiction(config: Config) -> str:
    """Return why these settings cannot be in force together, and what to change; "" if they can."""
    agents = config.outage_wait + AFTER_SUPERVISOR
    if config.suspend_limit <= agents:
        return (
            f"suspend_limit = {config.suspend_limit:g} s must be longer than outage_wait + "
            f"{AFTER_SUPERVISOR:g} s = {agents:g} s: nodes would end their ranks while robust-srun "
            "still waits for the network; raise suspend_limit or lower outage_wait"
        )
    most = SHOWN_STALE / 3
    if config.roster_interval > most:
        return (
            f"roster_interval = {config.roster_interval:g} s must be at most {most:g} s: "
            f"robust-status calls a job silent after {SHOWN_STALE:g} s; lower roster_interval"
        )
    if config.hang and 2 * config.interval > config.hang_floor:
        return (
            f"hang_floor = {config.hang_floor:g} s must be at least twice interval = "
            f"{config.interval:g} s: a job whose reports are on their way would look hung; raise "
            "hang_floor or lower interval"
        )
    return ""
