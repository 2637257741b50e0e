"""The settings of the pool: where its record is, and the name of its partition.

Root uses no file that others can write, and no variable that names another directory: it uses the
site's file, as the node gate does, and the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from health.settings import SITE_FILE
from health.settings_file import parse, read
from robust_slurm.command_line.errors import warn
from robust_slurm.config import FIELDS, ConfigError, load
from robust_slurm.slurm.objects import partition_name

PARTITION = str(FIELDS["standby_partition"].default)


class PoolSettings(NamedTuple):
    """``state_dir``: absolute; "": none is set."""

    state_dir: str
    partition: str


def pool_settings(state_dir: str | None, environ: Mapping[str, str], uid: int) -> PoolSettings:
    """The settings for this user; ``state_dir`` is the command line's. Raises ConfigError."""
    if uid == 0:
        return _roots(state_dir, environ.get("ROBUST_SITE_CONFIG", ""))
    config = load(
        cli={"robust-state-dir": state_dir} if state_dir else {},
        env=environ,
        warn=partial(warn, "robust-standby"),
    )
    return PoolSettings(str(config.state_dir), config.standby_partition or PARTITION)


def _roots(state_dir: str | None, named: str) -> PoolSettings:
    path = named or SITE_FILE
    try:
        found = parse(read(path)[0])
    except FileNotFoundError:
        if named:
            raise ConfigError(f"{path} (ROBUST_SITE_CONFIG): no such file") from None
        found = {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not used by root: {error}") from error
    kept = state_dir or found.get("state_dir", "")
    partition = found.get("standby_partition") or PARTITION
    if not isinstance(kept, str) or not isinstance(partition, str):
        raise ConfigError(f"{path}: state_dir and standby_partition are strings")
    if state_dir:
        kept = str(Path(state_dir).absolute())
    elif kept and not kept.startswith("/"):
        raise ConfigError(f"{path}: state_dir = {kept!r}: root needs an absolute path")
    try:
        return PoolSettings(kept.rstrip("/"), partition_name(partition))
    except ValueError as error:
        raise ConfigError(f"{path}: standby_partition: {error}") from None
