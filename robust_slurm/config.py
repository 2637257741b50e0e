"""Every setting of robust-slurm, in one table, and the four places it can come from.

Precedence, strongest first: command line (``--robust-spares=1``), environment
(``ROBUST_SPARES=1``), the file named by ``ROBUST_CONFIG`` or else ``./robust.toml``,
``/etc/robust-slurm/robust.toml``, the default below.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SITE_FILE = Path("/etc/robust-slurm/robust.toml")
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


class ConfigError(ValueError):
    """A setting that cannot be used; the text says where it came from and what is allowed."""


def _setting(
    default: Any, help_: str, *, unit: str = "", choices: tuple[str, ...] = (), minimum: float = 0
) -> Any:
    return field(
        default=default,
        metadata={"help": help_, "unit": unit, "choices": choices, "minimum": minimum},
    )


@dataclass(frozen=True, slots=True)
class Config:
    """All settings with their defaults. Times are seconds."""

    state_dir: Path = _setting(
        Path("~/.robust-slurm"), "directory on a file system that all nodes share"
    )
    spares: int = _setting(0, "nodes of the allocation that stay idle until one is lost")
    standby_partition: str = _setting(
        "standby", "partition that replaces lost nodes; empty: never ask for one"
    )
    standby_wait: float = _setting(
        30.0, "how long a recovery waits for a node of the standby partition", unit="s"
    )
    slurm_wait: float = _setting(
        900.0, "how long a recovery waits for slurmctld or munge while they are away", unit="s"
    )
    requeue: str = _setting(
        "auto",
        "last rung: put the job back in the queue without the bad nodes",
        choices=("auto", "never"),
    )
    max_restarts: int = _setting(3, "recoveries in a row without progress before giving up")
    drain: str = _setting(
        "never",
        "direct: drain a bad node at once (needs operator rights)",
        choices=("never", "direct"),
    )
    rank_env: bool = _setting(
        True,
        "RANK, WORLD_SIZE, MASTER_ADDR and the like for the tasks; off: they are independent "
        "programs, none is started again, and one that fails leaves the others running",
    )
    auto: bool = _setting(True, "see steps by torch's optimizer hook, without code change")
    progress_regex: str = _setting(
        "", "see steps in the ranks' output: a group 'step' or the first group is the number"
    )
    hang: bool = _setting(True, "detect hangs")
    hang_floor: float = _setting(
        10.0, "shortest silence of all ranks that can be called a hang", unit="s", minimum=0.1
    )
    busy_limit: float = _setting(
        600.0, "shortest time without a step, ranks busy, that is a hang", unit="s", minimum=0.1
    )
    start_limit: float = _setting(
        1800.0, "time for start-up and the first steps, and for a phase() not seen before", unit="s"
    )
    nan: str = _setting(
        "recover",
        "a loss that is not finite: restart from before it, or ignore it",
        choices=("recover", "ignore"),
    )
    stop_tests: float = _setting(
        60.0,
        "most time for tests of the machines while the ranks are down, when none is to blame "
        "for a NaN or a repeated crash; 0: never",
        unit="s",
    )
    test_python: str = _setting(
        "", "python with torch that runs these tests on the nodes (default: robust-task's)"
    )
    replay: int = _setting(
        0,
        "last resort when no machine is to blame: replay the job in small worlds for so many steps "
        "to find the node (the program must heed ROBUST_REPLAY); 0: never",
        unit="steps",
    )
    replay_limit: float = _setting(
        600.0, "most time for one round of replays, start-up included", unit="s", minimum=1
    )
    replay_rounds: int = _setting(
        2, "rounds in a row without a failure after which the replay is given up", minimum=1
    )
    replay_fixed: bool = _setting(
        False, "the program feeds every group the same data and weights: compare their losses"
    )
    outage_wait: float = _setting(
        10.0,
        "how long nodes that become unreachable together are waited for before they are replaced; "
        "the other nodes wait 5 s longer for a batch host that is unreachable",
        unit="s",
    )
    stall_limit: float = _setting(
        600.0,
        "how long a recovery waits for a shared file system, or for silent nodes whose kernels "
        "answer, before the nodes are replaced",
        unit="s",
    )
    stop_grace: float = _setting(1.0, "time between SIGTERM and SIGKILL for a rank", unit="s")
    stop_work_limit: float = _setting(
        60.0,
        "most time after stop_grace for a rank that is writing a file in its SIGTERM handler",
        unit="s",
    )
    interval: float = _setting(
        0.0, "time between a node's reports; 0: 0.25 s, above 64 nodes 0.5, above 256 1", unit="s"
    )
    checkpoint: bool = _setting(True, "keep what a Checkpointer saves in memory, with replicas")
    checkpoint_dir: str = _setting(
        "", "durable checkpoints: a directory that all nodes share; empty: the script's, or none"
    )
    checkpoint_every: int = _setting(
        0, "a durable checkpoint every so many steps; 0: by time only", unit="steps"
    )
    checkpoint_minutes: float = _setting(
        10.0, "a durable checkpoint every so many minutes; 0: by steps only", unit="min"
    )
    checkpoint_keep: int = _setting(2, "durable checkpoints that are kept", minimum=1)
    checkpoint_local_dir: str = _setting(
        "", "directory on each node's own disk for a copy of every durable checkpoint"
    )
    checkpoint_bandwidth: float = _setting(
        0.0, "most that a rank's replica may take of the network; 0: no limit", unit="MB/s"
    )
    checkpoint_interface: str = _setting(
        "", "network interface for snapshots between nodes, such as ib0 (default: the messages')"
    )
    checkpoint_overhead: float = _setting(
        3.0,
        "most that snapshots in memory may cost of the training's time; beyond it not every step "
        "is saved; 0: every step, whatever it costs",
        unit="%",
    )
    verify_every: int = _setting(
        0,
        "compute every so many steps' last one again on other nodes and compare all state to the "
        "bit (a restart and a step each time; the program must be deterministic); 0: never",
        unit="steps",
    )
    warm: bool = _setting(True, "have what the ranks import imported ahead of the next start")
    warm_packages: str = _setting(
        "", "packages of the training's own that may be imported ahead, too (a,b)"
    )
    place: bool = _setting(
        False, "order ranks over the nodes by the network: groups that talk under one switch"
    )
    mesh: str = _setting(
        "", "the groups, slowest first (pp=2,dp=8,tp=8), where no Checkpointer has named them"
    )
    place_alpha: float = _setting(
        0.3, "weight of data-parallel groups, 0 (pipelines only) to 1; above 0.5 is unusual"
    )
    task_python: str = _setting(
        "", "python that runs robust-task on the nodes (default: the one of robust-srun)"
    )
    verbose: bool = _setting(False, "say every decision on stderr, not only recoveries")
    log_level: str = _setting(
        "info",
        "least level of what goes to robust-srun.log in the job's directory below state_dir",
        choices=("debug", "info", "warning", "error"),
    )


FIELDS = dict(Config.__dataclass_fields__)


def flag(name: str) -> str:
    return "--robust-" + name.replace("_", "-")


def flags() -> dict[str, bool]:
    """Command-line flags (without the leading ``--``) -> whether they take a value."""
    out: dict[str, bool] = {"robust-help": False, "robust-config": True}
    for name, f in FIELDS.items():
        long = flag(name)[2:]
        if f.type == "bool":
            out[long] = False
            out["robust-no-" + long.removeprefix("robust-")] = False
        else:
            out[long] = True
    return out


def _convert(name: str, raw: object, origin: str) -> Any:
    f = FIELDS[name]
    kind = str(f.type)
    meta = f.metadata
    try:
        if kind == "bool":
            if isinstance(raw, bool):
                return raw
            word = str(raw).lower()
            if word not in _TRUE | _FALSE:
                raise ValueError("use true or false")
            return word in _TRUE
        if isinstance(raw, bool):
            raise ValueError(f"not a {kind}")
        if kind in ("int", "float"):
            number: float = int(str(raw)) if kind == "int" else float(str(raw))
            if not meta["minimum"] <= number < float("inf"):
                raise ValueError(f"must be at least {meta['minimum']:g}")
            return number
    except ValueError as err:
        raise ConfigError(f"{origin}: {name} = {raw!r}: {err}") from None
    if not isinstance(raw, str):
        raise ConfigError(f"{origin}: {name} = {raw!r}: not a string")
    if meta["choices"] and raw not in meta["choices"]:
        allowed = ", ".join(meta["choices"])
        raise ConfigError(f"{origin}: {name} = {raw!r}: use one of {allowed}")
    return Path(raw) if kind == "Path" else raw


def _from_file(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as err:
        raise ConfigError(f"{path}: cannot be read: {err}") from None
    out = {}
    for name, raw in table.items():
        if isinstance(raw, dict):
            continue  # a table belongs to another room of the house
        if name not in FIELDS:
            close = difflib.get_close_matches(name, FIELDS, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{path}: unknown setting {name!r}{hint}")
        out[name] = _convert(name, raw, str(path))
    return out


def load(
    cli: Mapping[str, str | None] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    site_file: Path = SITE_FILE,
) -> Config:
    """Merge all sources into a Config.

    ``cli`` maps flags without dashes (``robust-spares``) to their value, None for switches.
    Raises ConfigError naming the source of a bad value.
    """
    env = os.environ if env is None else env
    cli = cli or {}
    values: dict[str, Any] = {}
    named = cli.get("robust-config") or env.get("ROBUST_CONFIG")
    own = Path(named) if named else (cwd or Path()) / "robust.toml"
    for path, required in ((site_file, False), (own, bool(named))):
        if required or os.path.isfile(path):  # noqa: PTH113 - False also where we may not look
            values |= _from_file(path)
    for name in FIELDS:
        key = "ROBUST_" + name.upper()
        if env.get(key, "") != "":
            values[name] = _convert(name, env[key], f"environment {key}")
    for word, raw in cli.items():
        name = word.removeprefix("robust-").replace("-", "_")
        if name in ("help", "config"):
            continue
        if raw is None:
            values[name.removeprefix("no_")] = not name.startswith("no_")
        else:
            values[name] = _convert(name, raw, "--" + word)
    config = Config(**values)
    try:
        # Absolute: the tasks may run in another directory (srun --chdir).
        state_dir = config.state_dir.expanduser().absolute()
    except (RuntimeError, OSError) as err:
        raise ConfigError(
            f"state_dir = {str(config.state_dir)!r}: {err}; set it to a path"
        ) from None
    object.__setattr__(config, "state_dir", state_dir)
    return config


def help_text() -> str:
    """Return the text of ``--robust-help``: every setting with its default."""
    lines = [
        "robust-srun [srun options] [--robust-* options] command ...",
        "",
        "Takes srun's options as they are. Its own, each also as ROBUST_NAME in the",
        "environment and as name = value in robust.toml (./robust.toml or ROBUST_CONFIG,",
        f"then {SITE_FILE}):",
        "",
    ]
    for name, f in FIELDS.items():
        meta = f.metadata
        if f.type == "bool":
            word = flag("no_" + name if f.default else name)
        else:
            word = f"{flag(name)}={'|'.join(meta['choices']) or str(f.type).upper()}"
        shown = {"": "none", True: "on", False: "off"}.get(f.default, f.default)
        if f.type in ("int", "float"):
            shown = f"{f.default:g}"
        lines.append(f"  {word}")
        lines.append(f"      {meta['help']} [default: {shown}{' ' + meta['unit']}]".rstrip(" "))
    lines += [
        "  --robust-config=FILE",
        "      read this file instead of ./robust.toml",
        "",
        "Exit codes: the ranks' own as under srun; 2 bad input; 120 gave up recovering;",
        "121 a node is lost and nothing can replace it; 122 the job was put back in the queue.",
    ]
    return "\n".join(lines).replace(" ]", "]")
