"""Keeps ``torchrun``, started by srun once per node, pointed at the world of the current epoch.

torchrun takes defaults for its options from ``PET_<OPTION>``; options on its command line win.
So the first epoch runs the user's command line as it is and only fills what is missing. In later
epochs the node that a given address names may be gone, and a torchrun that still runs on a node
cut off from us must not be able to join again, so given addresses are rewritten:

- backend ``static`` (default): ``--master-addr``/``--master-port``, or ``--rdzv-endpoint`` which
  wins over them, become the epoch's master and port. Node ranks are ours, so they are stable.
- backend ``c10d``: ``--rdzv-endpoint`` becomes the epoch's master and port (node 0 recognises its
  own address and serves the store). torchrun itself numbers the nodes under c10d, by address, so
  survivors may change group rank (``late_arrivals.py`` brings what they lack): static moves none.
- other backends (etcd, a site's own): the endpoint is a service outside the job and stays.
- ``--rdzv-id`` (every backend) gets a suffix made of the epoch's port, so that an agent of an
  older epoch looks for another rendezvous even in an outside service.
- a loopback endpoint or address, and ``--standalone``, mean "this node" wherever it is: they stay.
- on a one-node world no address is filled in: torchrun then picks a free port by itself.
- ``--max-restarts`` becomes 0: ranks that torchrun starts again by itself would get no restore
  plan, only the last checkpoint on disk, and nobody would see what failed. The restart is ours.

An address computed inside a shell script around torchrun is beyond reach here; such a script
must take it from MASTER_ADDR and MASTER_PORT or SLURM_JOB_NODELIST, which are the epoch's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

_FLAGS = frozenset(  # options without a value
    ("help", "standalone", "module", "no-python", "run-path", "virtual-local-rank", "use-env")
)
_VALUED = frozenset(
    (
        *("nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port", "local-addr"),
        *("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts", "role"),
        *("monitor-interval", "start-method", "event-log-handler", "log-dir", "redirects"),
        *("tee", "local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters"),
        *("logs-specs", "numa-binding", "signals-to-handle", "shutdown-timeout"),
    )
)
_SHORT_VALUED = frozenset("rt")
_PYTHON = re.compile(r"python[0-9.]*t?", re.ASCII)
_PYTHON_VALUED = frozenset("WX")  # python's own options that take the next word
_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_LOOPBACK = re.compile(r"(localhost|127\.[0-9.]+|::1|\[::1\])(:[0-9]*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Given:
    """An option of torchrun on the command line: where its value stands."""

    at: int  # index of the word that holds the value
    lead: str  # what stands before the value in that word ("--rdzv-id=")
    value: str


def torchrun_overrides(
    command: Sequence[str],
    world_nodes: int,
    node_rank: int,
    master_addr: str,
    master_port: int,
    first_epoch: bool,
    env: Mapping[str, str] | None = None,
    resized: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """The command to run and the environment to add; ``(command, {})`` if it is not torchrun.

    ``env``: where the user's own PET_RDZV_BACKEND and the like are looked up, if given.
    ``resized``: the world has not as many nodes as the command line says.
    """
    words = list(command)
    start = _arguments(words)
    if start is None:
        return words, {}
    given, flags = _scan(words, start)
    env = env or {}
    asked = partial(_asked, given, env)
    restarts: dict[str, str] = {}
    if restarts_itself(words, env):
        if "max-restarts" in given:
            words[given["max-restarts"].at] = given["max-restarts"].lead + "0"
        else:
            restarts[_pet("max-restarts")] = "0"
    if _standalone(flags, env):
        return words, restarts
    backend = asked("rdzv-backend", "static")
    host = f"[{master_addr}]" if ":" in master_addr and master_addr[0] != "[" else master_addr
    want = {"nnodes": str(world_nodes)}
    if backend == "static":  # others number the nodes themselves, and warn when told
        want["node-rank"] = str(node_rank)
    endpoint = f"{host}:{master_port}"
    if backend == "static" and world_nodes > 1 and not asked("rdzv-endpoint", ""):
        want |= {"master-addr": host, "master-port": str(master_port)}
    elif backend == "c10d" and world_nodes > 1 and not asked("rdzv-endpoint", ""):
        want["rdzv-endpoint"] = endpoint
    new: dict[str, str] = {"nnodes": str(world_nodes)} if resized else {}
    if not first_epoch:
        if backend in ("static", "c10d"):
            local = _LOOPBACK.fullmatch(asked("rdzv-endpoint", asked("master-addr", host)))
            if not local:
                new |= {"master-addr": host, "master-port": str(master_port)}
                new["rdzv-endpoint"] = endpoint
                if env.get("PET_RDZV_ENDPOINT"):
                    want.setdefault("rdzv-endpoint", endpoint)
        new["rdzv-id"] = f"{asked('rdzv-id', 'none')}-p{master_port}"
        if backend != "static":
            want["rdzv-id"] = new["rdzv-id"]
    for option, value in new.items():
        if option in given:
            words[given[option].at] = given[option].lead + value
    return words, restarts | {_pet(o): value for o, value in want.items() if o not in given}


def restarts_itself(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Number of restarts that torchrun is told to make by itself; 0 for other commands."""
    start = _arguments(command)
    if start is None:
        return 0
    asked = _asked(_scan(command, start)[0], env, "max-restarts", "0")
    return int(asked) if re.fullmatch(r"[0-9]{1,9}", asked, re.ASCII) else 0


def starts_ranks(command: Sequence[str]) -> bool:
    """True if the command is a torchrun: each task is then a node, whose ranks it starts."""
    return _arguments(command) is not None


def numbers_nodes(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """True if the command is a torchrun that numbers its nodes itself, in whatever order."""
    start = _arguments(command)
    if start is None:
        return False
    given, flags = _scan(command, start)
    dynamic = _asked(given, env, "rdzv-backend", "static") in ("c10d", "etcd-v2", "etcd")
    return dynamic and not _standalone(flags, env)


def sorts_nodes(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """True if the command is a torchrun that numbers its nodes in the order of the hosts' names."""
    start = _arguments(command)
    if start is None:
        return False
    given, flags = _scan(command, start)
    asked = partial(_asked, given, env)
    dynamic = asked("rdzv-backend", "static") in ("c10d", "etcd-v2")
    return dynamic and not asked("local-addr", "") and not _standalone(flags, env)


def _asked(given: Mapping[str, _Given], env: Mapping[str, str], option: str, default: str) -> str:
    if option in given:
        return given[option].value
    return env.get(_pet(option)) or default


def _standalone(flags: Collection[str], env: Mapping[str, str]) -> bool:
    return "standalone" in flags or env.get("PET_STANDALONE", "0") not in ("", "0")


def _pet(option: str) -> str:
    return "PET_" + option.upper().replace("-", "_")


def _arguments(words: Sequence[str]) -> int | None:
    """Index of torchrun's first argument; None if the command is not torchrun."""
    if not words:
        return None
    program = words[0].rpartition("/")[2]
    if program == "torchrun":
        return 1
    if not _PYTHON.fullmatch(program):
        return None
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        cluster = words[at][1:]
        if words[at].startswith("--"):
            # python's few long options take no next word but one
            at += 2 if words[at] == "--check-hash-based-pycs" else 1
            continue
        for i, letter in enumerate(cluster):
            rest = cluster[i + 1 :]
            if letter == "c":
                return None
            if letter == "m":
                module = rest or (words[at + 1] if at + 1 < len(words) else "")
                return at + (1 if rest else 2) if module in _MODULES else None
            if letter in _PYTHON_VALUED:
                at += 0 if rest else 1
                break
        at += 1
    if at < len(words) and words[at].rpartition("/")[2] == "torchrun":
        return at + 1  # python /path/bin/torchrun
    return None


def _scan(words: Sequence[str], at: int) -> tuple[dict[str, _Given], set[str]]:
    """torchrun's own options, up to the training script."""
    given: dict[str, _Given] = {}
    flags: set[str] = set()
    while at < len(words):
        word = words[at]
        if not word.startswith("-") or word in ("-", "--"):
            break
        at += 1
        if not word.startswith("--"):
            letter, rest = word[1], word[2:]
            if letter in _SHORT_VALUED and not rest:
                at += 1
            continue
        typed, equals, value = word[2:].partition("=")
        option = _resolve(typed)
        if option in _FLAGS:
            flags.add(option)
        elif equals:
            given[option] = _Given(at - 1, f"--{typed}=", value)
        elif option in _VALUED and at < len(words):
            given[option] = _Given(at, "", words[at])
            at += 1
        # an option of another torch release: taken for a switch unless written with "="
    return given, flags


def _resolve(typed: str) -> str:
    """Canonical name; argparse allows unambiguous abbreviations and "_" for "-"."""
    name = typed.replace("_", "-")
    if name in _FLAGS or name in _VALUED:
        return name
    found = [option for option in _FLAGS | _VALUED if option.startswith(name)]
    return found[0] if len(found) == 1 else name
