"""The four places that a setting (``robust_slurm.settings``) can come from.

Precedence, strongest first: command line (``--robust-spares=1``), environment
(``ROBUST_SPARES=1``), the file named by ``ROBUST_CONFIG`` or else ``./robust.toml``,
``/etc/robust-slurm/robust.toml``, the default.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from robust_slurm.settings import FIELDS as FIELDS
from robust_slurm.settings import Config as Config
from robust_slurm.settings import ConfigError as ConfigError
from robust_slurm.settings import contradiction
from robust_slurm.text import closest, did_you_mean

SITE_FILE = Path("/etc/robust-slurm/robust.toml")
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
_OWN = """
    BEAT_DIR BY_PLUGIN CKPT_SOCKET CODE_SOURCE CODE_TREE CODE_VERSION CODE_VERSIONS CONFIG
    DATA_NODES DEBUG_CHECKPOINTS DRY_RUN EPOCH JOB_ID LAUNCHER_IMPORTS LEARN PORT REPLAY
    REPLAY_GROUP REPLAY_MESH REPLAY_STEPS REPLICA_RANKS RESIZED RESTART_REASON RESUME_STEP RUN_ID
    SHIM SITE_CONFIG SRUN_TIMES STANDBY_REQUEST STEP_KEY TORCHRUN_BROKER WARM_FD WARM_PAD
"""
OWN_VARIABLES = frozenset("ROBUST_" + name for name in _OWN.split())
"""Our environment variables that are not settings. Add each new one here."""
_OWN_PREFIXES = ("ROBUST_TEST_", "ROBUST_LAB_")
Warn = Callable[[str], None]


def flag(name: str) -> str:
    return "--robust-" + name.replace("_", "-")


def flags() -> dict[str, bool]:
    """Command-line flags (without the leading ``--``) -> whether they take a value."""
    out: dict[str, bool] = {
        "robust-help": False,
        "robust-version": False,
        "robust-explain": False,
        "robust-config": True,
    }
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
        near = did_you_mean(raw, meta["choices"])
        raise ConfigError(f"{origin}: {name} = {raw!r}: use one of {allowed}{near}")
    return Path(raw) if kind == "Path" else raw


def unknown_variables(env: Mapping[str, str]) -> list[str]:
    """Return a warning for each ``ROBUST_*`` variable that is no setting and none of ours."""
    known = OWN_VARIABLES.union("ROBUST_" + name.upper() for name in FIELDS)
    found = []
    for name in sorted(env):
        if not name.startswith("ROBUST_") or name in known or name.startswith(_OWN_PREFIXES):
            continue
        near = closest(name.removeprefix("ROBUST_"), FIELDS).upper()
        hint = f"; did you mean ROBUST_{near}?" if near else ""
        found.append(f"environment {name} is ignored: there is no such setting{hint}")
    return found


def _from_file(path: Path, ignored: Warn | None = None) -> dict[str, Any]:
    """Return a file's settings. ``ignored`` is called with unknown ones; None: they are errors."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as err:
        why = isinstance(err, OSError) and err.strerror
        raise ConfigError(f"{path}: cannot be read: {why or err}") from None
    out = {}
    for name, raw in table.items():
        if isinstance(raw, dict):
            continue  # tables belong to other parts of robust-slurm
        if name not in FIELDS:
            wrong = f"{path}: unknown setting {name!r}{did_you_mean(name, FIELDS)}"
            if ignored is None:
                raise ConfigError(wrong)
            ignored(wrong)
            continue
        out[name] = _convert(name, raw, str(path))
    return out


def load(
    cli: Mapping[str, str | None] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    site_file: Path = SITE_FILE,
    warn: Warn | None = None,
    strict: bool = False,
) -> Config:
    """Merge all sources into a Config.

    ``cli`` maps flags without dashes (``robust-spares``) to their value, None for switches.
    ``warn`` is called with what is ignored: unknown settings of the site's file, which may be for
    a newer release than this one, and unknown variables. ``strict``: unknown settings of the
    site's file are errors. Raises ConfigError naming the source of a bad value.
    """
    env = os.environ if env is None else env
    cli = cli or {}
    values: dict[str, Any] = {}
    named = cli.get("robust-config") or env.get("ROBUST_CONFIG")
    own = Path(named) if named else (cwd or Path()) / "robust.toml"
    tell = warn or (lambda text: None)
    if os.path.isfile(site_file):  # noqa: PTH113 - False also where we may not look
        values |= _from_file(site_file, None if strict else tell)
    if named or os.path.isfile(own):  # noqa: PTH113
        values |= _from_file(own)
    for text in unknown_variables(env):
        tell(text)
    for name in FIELDS:
        key = "ROBUST_" + name.upper()
        if env.get(key, "") != "":
            values[name] = _convert(name, env[key], f"environment {key}")
    for word, raw in cli.items():
        name = word.removeprefix("robust-").replace("-", "_")
        if name in ("help", "version", "explain", "config"):
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
    if why := contradiction(config):
        raise ConfigError(why)
    return config


def help_text() -> str:
    """Return the text of ``--robust-help``: every setting with its default."""
    lines = [
        "robust-srun [srun options] [--robust-* options] command ...",
        "",
        "Accepts every srun option (srun --help lists them) except --multi-prog, --bcast and",
        "heterogeneous steps (:).",
        "Each option below is also ROBUST_NAME in the environment and name = value in",
        f"robust.toml (./robust.toml or the file in ROBUST_CONFIG, then {SITE_FILE}):",
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
        if f.default is True:
            lines.append(f"      {meta['off']} [default: {name} is on]")
            continue
        lines.append(f"      {meta['help']} [default: {shown}{' ' + meta['unit']}]".rstrip(" "))
    lines += [
        "  --robust-config=FILE",
        "      read this file instead of ./robust.toml",
        "  --robust-explain",
        "      print the rules of diagnosis and recovery with the limits in force, and exit",
        "  --robust-version",
        "      print the version of robust-slurm and exit (--version: Slurm's as well)",
        "",
        "Exit codes: the ranks' own as under srun; 2 bad input; 120 gave up recovering;",
        "121 a node is lost and nothing can replace it; 122 the job was requeued.",
    ]
    return "\n".join(lines).replace(" ]", "]")
