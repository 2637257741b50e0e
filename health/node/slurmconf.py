"""A node in Slurm's own files: slurm.conf's NodeName lines and gres.conf.

Read as slurmd reads them (src/common/parse_config.c, read_config.c, interfaces/gres.c): comments,
continued lines, Include, ``NodeName=DEFAULT`` lines that hold for the lines after them, keys in
any case, the latest value of a key that comes twice, host lists with any number of brackets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from health.node.system import System
from robust_slurm.hostlist import contains, expand, split

# Where slurmd looks (man slurm.conf), then the usual --sysconfdir of own builds.
PLACES = (
    "/etc/slurm/slurm.conf",
    "/run/slurm/conf/slurm.conf",  # configless
    "/usr/local/etc/slurm.conf",
    "/opt/slurm/etc/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
)
INCLUDE_DEPTH = 8

_PAIR = re.compile(r'\s*([A-Za-z0-9_.]+)\s*[-*+/]?=\s*(?:"([^"]*)"|(\S+))')
_SLICE = re.compile(r"(?:^|_)\d+g\.\d+gb")  # a MIG profile as a GRES type: a100_1g.5gb
_GPU_FILE = re.compile(r"/dev/nvidia\d+")
_COUNT = re.compile(r"(\d{1,12})([kKmMgGtT]?)")
_MULTIPLES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class NodeLine(NamedTuple):
    """A node's line of slurm.conf with the DEFAULT lines before it; keys in lower case."""

    values: dict[str, str]

    @property
    def real_memory(self) -> int:
        """MiB; 0: not configured."""
        return _number(self.values.get("realmemory", ""))

    @property
    def gpus(self) -> dict[str, int]:
        """GPUs by type ("" without one), as Gres= counts them."""
        return parse_gres(self.values.get("gres", ""))


class Conf(NamedTuple):
    """slurm.conf as far as one node needs it."""

    path: str  # "": none was found
    values: dict[str, str]  # global keys in lower case
    node: NodeLine | None  # None: no line names the node
    problems: tuple[str, ...]  # what could not be read


_last: tuple[System, Conf] | None = None


def load(system: System) -> Conf:
    """The configuration of the context's node. Never raises for what is missing or unreadable.

    Several checks of one run ask for it: that of the last system is kept.
    """
    global _last
    if _last is None or _last[0] is not system:
        _last = system, _load(system)
    return _last[1]


def _load(system: System) -> Conf:
    given = system.context.env.get("SLURM_CONF", "")
    problems: list[str] = []
    for path in (given,) if given else PLACES:
        try:
            text = system.read(path)
        except FileNotFoundError:
            continue
        except OSError as err:
            problems.append(f"{path}: {err.strerror}")
            continue
        reader = _ConfReader(system, path, problems)
        reader.read(text)
        return Conf(path, reader.values, reader.node, tuple(problems))
    if not problems:
        problems.append(f"no {given}" if given else "no slurm.conf in the usual places")
    return Conf("", {}, None, tuple(problems))


def expected_gpus(system: System) -> int | None:
    """The number of GPUs that Slurm expects in this node; None: its files do not say.

    Where Slurm counts MIG slices, the GPUs are those whose device files gres.conf names.
    """
    conf = load(system)
    if conf.node is None:
        return None
    gpus = conf.node.gpus
    if any(map(is_slice, gpus)):
        return len([file for file in gpu_files(system) if _GPU_FILE.fullmatch(file)]) or None
    return sum(gpus.values())


def is_slice(kind: str) -> bool:
    """True if a GRES type is a part of a GPU (a MIG profile)."""
    return bool(_SLICE.search(kind.lower()))


def gpu_files(system: System) -> list[str]:
    """The device files that gres.conf names for this node's GPUs, each once, in its order.

    Empty where there is no gres.conf or AutoDetect finds them. Raises OSError, ValueError.
    """
    conf = load(system)
    if not conf.path:
        return []
    path = conf.path.rpartition("/")[0] + "/gres.conf"
    try:
        text = system.read(path)
    except FileNotFoundError:
        return []
    found: dict[str, None] = {}
    for line in _with_includes(system, path, text, conf.values, []):
        keys = _pairs(line)
        if "nodename" in keys and not contains(keys["nodename"], system.context.node):
            continue
        if keys.get("name", "").lower() == "gpu":
            for key in ("file", "files", "multiplefiles"):
                found.update(dict.fromkeys(expand(keys.get(key, ""))))
    return list(found)


def spool_dir(system: System) -> str:
    """SlurmdSpoolDir with %n and %h filled in."""
    conf = load(system)
    node = system.context.node
    host = conf.node.values.get("nodehostname", node) if conf.node else node
    path = conf.values.get("slurmdspooldir", "/var/spool/slurmd")
    return path.replace("%h", node if "[" in host else host).replace("%n", node)


def parse_gres(gres: str) -> dict[str, int]:
    """GPUs by type in the value of Gres=: "gpu:a100:4(S:0-1),gpu:2,nic:1" -> {"a100": 4, "": 2}.

    As Slurm's _get_gres_cnt: a name without a number counts one, a bad number ends the count.
    """
    out: dict[str, int] = {}
    for token in split(gres):
        name, *rest = token.partition("(")[0].split(":")
        if name != "gpu":
            continue
        count = 1
        if rest and rest[-1][:1].isdigit():
            number = _COUNT.fullmatch(rest.pop())
            if not number:
                break  # so does Slurm: "Bad GRES configuration"
            count = int(number[1]) * _MULTIPLES[number[2].lower()]
        kind = next((part for part in rest if part.lower() != "no_consume"), "")
        out[kind] = out.get(kind, 0) + count
    return out


class _ConfReader:
    """One pass over slurm.conf and what it includes."""

    def __init__(self, system: System, path: str, problems: list[str]):
        self.system, self.path, self.problems = system, path, problems
        self.values: dict[str, str] = {}
        self.node: NodeLine | None = None
        self._defaults: dict[str, str] = {}

    def read(self, text: str) -> None:
        for line in _with_includes(self.system, self.path, text, self.values, self.problems):
            pair = _PAIR.match(line)
            if not pair:
                continue
            key, value = pair[1].lower(), pair[2] if pair[2] is not None else pair[3]
            if key == "nodename":
                self._nodes(value, line)
            elif key != "partitionname":
                self.values[key] = value

    def _nodes(self, names: str, line: str) -> None:
        if names.upper() == "DEFAULT":
            self._defaults |= _pairs(line)
        elif self.node is None and self._ours(names):
            self.node = NodeLine(self._defaults | _pairs(line))

    def _ours(self, names: str) -> bool:
        node = self.system.context.node
        if "[" not in names and "," not in names:
            return names == node
        try:
            return contains(names, node)
        except ValueError as err:
            self.problems.append(f"{self.path}: NodeName={names[:80]}: {err}")
            return False


def _with_includes(
    system: System,
    path: str,
    text: str,
    values: dict[str, str],
    problems: list[str],
    depth: int = 0,
) -> Iterator[str]:
    """The lines of a file with those of the included ones in their place.

    ``values`` has ClusterName by the time that ``Include %c.conf`` asks for it.
    """
    for line in _lines(text):
        words = line.split(None, 2)
        if len(words) < 2 or words[0].lower() != "include":
            yield line
            continue
        name = words[1].replace("%c", values.get("clustername", "").lower())
        inner = name if name.startswith("/") else f"{path.rpartition('/')[0]}/{name}"
        if depth >= INCLUDE_DEPTH:
            problems.append(f"{inner}: included more than {INCLUDE_DEPTH} deep")
            continue
        try:
            included = system.read(inner)
        except OSError as err:
            problems.append(f"{inner}: {err.strerror}")
            continue
        yield from _with_includes(system, path, included, values, problems, depth + 1)


def _lines(text: str) -> Iterator[str]:
    """Logical lines: comments cut, continued lines joined, escapes taken out."""
    held = ""
    for raw in text.split("\n"):
        line = raw
        if "#" in line:
            line = _uncomment(line)
        if "\\" not in line and not held:
            if line and not line.isspace():
                yield line
            continue
        body = line.rstrip()
        slashes = len(body) - len(body.rstrip("\\"))
        if slashes % 2:
            held += body[:-1]
            continue
        line, held = re.sub(r"\\(.?)", r"\1", held + line), ""
        if line and not line.isspace():
            yield line
    if held:
        yield re.sub(r"\\(.?)", r"\1", held)


def _uncomment(line: str) -> str:
    at = -1
    while (at := line.find("#", at + 1)) >= 0:
        before = line[:at]
        if (len(before) - len(before.rstrip("\\"))) % 2 == 0:
            return before
    return line


def _pairs(line: str) -> dict[str, str]:
    """key=value pairs of one line, keys in lower case, up to where it makes no sense."""
    out: dict[str, str] = {}
    at = 0
    while match := _PAIR.match(line, at):
        out[match[1].lower()] = match[2] if match[2] is not None else match[3]
        at = match.end()
    return out


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0
