"""The snapshot that a job starts with, from robust-srun's settings and command line."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from robust_slurm.settings import Config
from srun_wrapper.code.deployment import Deployment, deploy
from srun_wrapper.code.listing import CodeError
from srun_wrapper.code.snapshot import Asked


def start_with_code(
    config: Config,
    records: Path | None,
    directory: str | None,
    words: tuple[str, ...],
    env: Mapping[str, str],
) -> tuple[Deployment | None, str]:
    """Return the job's code and one line about it; ``directory``: of srun's --chdir.

    A job without records runs without a snapshot: it has waited for its nodes. Raises CodeError.
    """
    if records is None:
        return None, f"warning: no snapshot of {config.code}: the job has no record directory"
    here = str(Path.cwd())
    old = os.path.normpath(Path(here, directory)) if directory else here
    source = os.path.realpath(Path(here, Path(config.code).expanduser()))
    if not Path(source).is_dir():
        raise CodeError(f"{source} is not a directory")
    shared = Path(config.code_store).expanduser().absolute() / records.name
    place = shared if config.code_store else records / "code"
    # Not resolved itself: others may make links in code_store.
    store = f"{os.path.realpath(place.parent)}/{place.name}"
    if store == source or source.startswith(store + "/"):
        raise CodeError(f"the directory of the code, {source}, is inside code_store, {store}")
    asked = Asked(source, store, excluded(config, source, store), config.code_limit * 1e6)
    try:
        return deploy(asked, records, me(), old, words, env, restarts=config.rank_env)
    except OSError as err:
        raise CodeError(f"{err.filename or records}: {err.strerror or err}") from None


def excluded(config: Config, source: str, store: str) -> tuple[str, ...]:
    """Return what the user excludes; and the state directory, if it is inside the source."""
    given = tuple(filter(None, (name.strip() for name in config.code_exclude.split(","))))
    state = os.path.realpath(config.state_dir)
    places = (state, store)
    own = (os.path.relpath(p, source) for p in places if p.startswith(source + "/"))
    return (*given, *own)


def me() -> tuple[str, str]:
    """Return this user's name and this host's."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return user, socket.gethostname().partition(".")[0]
