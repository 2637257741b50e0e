"""Hindrances to the gate in the site's files, partitions and GPUs. Pure: facts in, remarks out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from health.admin.install import ETC, Present
from health.admin.trust import close
from health.admin.want import Level, Want
from health.node.slurmconf import is_slice, parse_gres
from health.node.trust import Hole
from robust_slurm.slurm.values import fold
from robust_slurm.text import counted

OLDEST, NEWEST = (22, 5), (26, 5)  # the releases whose behaviour was looked at


class Remark(NamedTuple):
    """``line`` is what to paste, into ``where``: slurm.conf, robust.toml or a shell."""

    level: Level
    subject: str
    what: str
    where: str = ""
    line: str = ""


def of_wants(wants: Iterable[Want]) -> list[Remark]:
    """The settings of slurm.conf, those that are right included."""
    return [
        Remark(
            want.level,
            f"{want.key} = {want.now}" if want.now else f"{want.key} is not set",
            want.why,
            want.where,
            "" if want.level == "ok" else want.line(),
        )
        for want in wants
    ]


def of_release(release: tuple[int, int] | None, text: str) -> Remark:
    if release is not None and OLDEST <= release <= NEWEST:
        return Remark("ok", "Slurm", text)
    span = " to ".join(f"{major}.{minor:02}" for major, minor in (OLDEST, NEWEST))
    return Remark("advice", "Slurm", f"{text or 'unknown release'}: robust-slurm knows {span}")


# A release, the first patch that is without the crash, and what crashed slurmctld before it.
_CRASHES = (
    ((24, 11), 6, "many requeues under heavy load"),
    ((26, 5), 4, "the requeue of a job that is completing"),
)


def of_crashes(text: str) -> list[Remark]:
    """Warn of releases in which a requeue, which robust-srun and the gate ask for, is dangerous."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    major, minor, patch = map(int, found.groups()) if found else (0, 0, 0)
    return [
        Remark(
            "advice",
            f"Slurm {text}",
            f"{what} can crash slurmctld; robust-srun and the gate requeue jobs; update Slurm to "
            f"{major}.{minor:02}.{fixed} or later",
        )
        for release, fixed, what in _CRASHES
        if (major, minor) == release and patch < fixed
    ]


class Bare(NamedTuple):
    """Slurm's commands as the sweep starts them: looked for in ``places``; ``elsewhere`` the
    directory where scontrol is instead ("" none); ``problem`` why it reached no slurmctld;
    ``hole`` where others than root could change them."""

    places: str
    elsewhere: str = ""
    problem: str = ""
    hole: Hole | None = None


def of_bare(bare: Bare, config: Mapping[str, str], toml: str) -> list[Remark]:
    if bare.hole:
        line = close([bare.hole.place])
        what = f"root does not run Slurm's commands there: {bare.hole}"
        return [Remark("fix", "others can change Slurm's commands", what, "shell", line)]
    if bare.elsewhere:
        what = f"the gate has no PATH and looks for it in {bare.places.replace(':', ', ')}"
        line = f'[gate]\nslurm_bin = "{bare.elsewhere}"'
        return [Remark("fix", "scontrol is not where the gate looks", what, toml, line)]
    if not bare.problem:
        return [Remark("ok", "scontrol", "reaches slurmctld without PATH and SLURM_CONF")]
    what = (
        "slurmd gives HealthCheckProgram no SLURM_CONF, and without it scontrol reaches no "
        f"slurmctld: {bare.problem}; on every node put slurm.conf where Slurm was built to look"
    )
    file = config.get("SLURM_CONF", "") or "<your slurm.conf>"
    line = f"install -d /etc/slurm && ln -s {file} /etc/slurm/slurm.conf"
    return [Remark("fix", "the sweep does not reach Slurm", what, "shell", line)]


# ---- robust.toml and the state directory


def of_settings(path: str, present: bool, problems: Sequence[str]) -> list[Remark]:
    """``problems`` are the gate's and robust-srun's own words on the file."""
    if problems:
        return [Remark("fix", path, problem) for problem in problems]
    return [Remark("ok", path, "valid" if present else "not there: the defaults apply")]


class StateDir(NamedTuple):
    """The shared state directory: ``problem`` why it could not be looked at, ``fstype`` what it
    lies on (empty: not known), ``remote`` whether that type is one that nodes share."""

    path: str
    problem: str = ""
    fstype: str = ""
    remote: bool = False
    nodes: Present = Present("none")
    jobs: Present = Present("none")


def of_state_dir(state: StateDir, toml: str) -> list[Remark]:
    if not state.path:
        text = (
            "not set to an absolute path: no cluster-wide ledger of nodes, no cluster-wide "
            "circuit breaker, and reports by robust-srun are not verified"
        )
        line = 'state_dir = "/shared/robust-slurm"'
        return [Remark("advice", "state_dir", text, toml, line)]
    name = f"state_dir {state.path}"
    if state.problem:
        return [Remark("fix", name, state.problem, "shell", f"install -d -m 0755 {state.path}")]
    found = []
    if state.fstype and not state.remote:
        text = (
            f"lies on {state.fstype}, which is local to this machine: all nodes must see the "
            "same directory"
        )
        found.append(Remark("advice", name, text))
    for sub, there, mode, why in (
        (
            "nodes",
            state.nodes,
            0o755,
            "the ledger of nodes must belong to root and be writable by root only",
        ),
        (
            "jobs",
            state.jobs,
            0o1777,
            "the jobs' records must be writable by all users, with the sticky bit, as /tmp is",
        ),
    ):
        if there != Present("dir", mode=mode):
            now = "missing" if there.kind == "none" else f"{there.kind}, mode {there.mode:04o}"
            now += f", uid {there.uid}" if there.uid else ""
            line = f"install -d -o root -g root -m {mode:04o} {state.path}/{sub}"
            found.append(Remark("fix", f"{state.path}/{sub}", f"{now}: {why}", "shell", line))
    return found or [Remark("ok", name, f"{state.fstype or 'there'}")]


def of_refused(refused: Sequence[Sequence[Any]]) -> list[Remark]:
    """Nodes that the circuit breaker kept in service: rows of ``Refusal``, the last one counts."""
    last = {row[1]: row for row in refused}
    return [
        Remark(
            "advice",
            f"{node} was NOT drained",
            f"for {reason or cause}: {why}; the node accepts jobs. Many nodes with the same "
            f"reason share a cause: find it first; otherwise drain the node by hand",
            "shell",
            f"scontrol update nodename={node} state=drain reason=...",
        )
        for node, (_, _, cause, reason, why, _) in sorted(last.items())
    ]


# ---- partitions and GPUs


def of_standby(
    name: str, configured: bool, partitions: Mapping[str, tuple[Sequence[str], str]]
) -> Remark:
    """``partitions``: the nodes and the state of each."""
    subject = f"standby partition {name}" if name else "standby partition"
    if not name:
        return Remark(
            "ok", subject, "none configured: lost nodes are replaced by spares or a requeue"
        )
    nodes, state = partitions.get(name, ((), ""))
    if state == "UP" and nodes:
        return Remark("ok", subject, counted(len(nodes), "node"))
    level: Level = "fix" if configured else "advice"
    if name not in partitions:
        text = "Slurm has no such partition: a lost node can only be replaced by a requeue"
        line = f"PartitionName={name} Nodes=<some nodes of no other partition> State=UP"
        return Remark(level, subject, text, "slurm.conf", line)
    text = f"state {state}, {counted(len(nodes), 'node')}: it can replace no lost node"
    return Remark(level, subject, text, "shell", f"scontrol update PartitionName={name} State=UP")


class NodeGpus(NamedTuple):
    """One node: what Slurm's Gres says (None: nothing), what robust.toml expects (-1: as Slurm)."""

    name: str
    gres: str | None
    expected: int


def of_gpus(nodes: Iterable[NodeGpus], toml: str) -> list[Remark]:
    wrong: dict[tuple[int, int], list[str]] = {}
    total = 0
    for node in nodes:
        kinds = parse_gres(node.gres or "")
        if any(is_slice(kind) for kind in kinds):  # parts of GPUs: nothing to compare
            total += 1
            continue
        count = sum(kinds.values())
        total += max(count, node.expected, 0)
        if node.expected >= 0 and node.expected != count:
            wrong.setdefault((count, node.expected), []).append(node.name)
    found = [
        Remark(
            "fix",
            f"GPUs of {fold(names)}",
            f"Slurm has Gres=gpu:{count}, robust.toml expects {expected}: no job would start there",
            toml,
            f"[health.gpu_count]\nexpected = {count}",
        )
        for (count, expected), names in wrong.items()
    ]
    if not total:
        text = "Slurm has no GPU configured on any node: a lost GPU would not be noticed"
        line = "GresTypes=gpu, and Gres=gpu:<type>:<count> on the NodeName lines"
        found.append(Remark("advice", "GPUs", text, "slurm.conf", line))
    return found or [Remark("ok", "GPUs", f"{total} configured")]


# ---- files


class Installed(NamedTuple):
    """A file of the manifest: what is there, whether it is as it was written, and where on its way
    somebody but root could change it."""

    path: str
    there: Present
    changed: bool
    hole: Hole | None = None


def of_files(
    etc: str, manifest: bool, files: Iterable[Installed], stubs: Sequence[str], is_node: bool
) -> list[Remark]:
    """``stubs``: the names of the files that Slurm runs; ``is_node``: Slurm runs jobs here."""
    again = install_command(etc)
    if not manifest and not is_node:
        what = (
            "nothing is installed here, and this machine is not a Slurm node; check the nodes "
            "from here, or run the doctor on one of them"
        )
        line = f"{again} --nodes <nodes> --ssh --dry-run"
        return [Remark("advice", etc, what, "shell", line)]
    if not manifest:
        return [Remark("fix", etc, "nothing is installed on this machine", "shell", again)]
    found: list[Remark] = []
    for path, there, changed, hole in files:
        stub = path.rpartition("/")[2] in stubs
        if there.kind == "none":
            if stub:
                found.append(Remark("fix", path, "it is missing", "shell", again))
        elif hole:
            what = f"root runs or reads it, but {hole}"
            found.append(Remark("fix", path, what, "shell", close([hole.place])))
        elif stub and not there.mode & 0o100:
            line = f"chmod 0755 {path}"
            found.append(
                Remark("fix", path, f"mode {there.mode:04o}: not executable", "shell", line)
            )
        elif stub and changed:
            found.append(Remark("advice", path, "was changed by hand", "shell", again))
    return found or [Remark("ok", etc, "the files are root's and as they were installed")]


def of_active(python: str, hole: Hole | None, problem: str) -> list[Remark]:
    """``hole``: where others could change what the interpreter of the active tests runs."""
    name = f"[active] python = {python}"
    if hole:
        what = f"root runs it, but {hole}; the gate does not use it"
        return [Remark("fix", name, what, "shell", close([hole.place]))]
    if problem:
        return [Remark("fix", name, f"its files cannot be checked: {problem}")]
    return [Remark("ok", name, "only root can change what it runs")]


def install_command(etc: str) -> str:
    return "robust-admin install" if etc == ETC else f"robust-admin install --etc {etc}"


def of_code(
    prefix: str, untrusted: Sequence[str], repair: str, broken: str, notes: Sequence[str]
) -> list[Remark]:
    """The interpreter and packages that the stubs start: who may write them (``repair``: the
    command that ends it), do they start."""
    found = []
    if broken:
        found.append(Remark("fix", "the stubs' python", broken))
    if untrusted:
        what = f"a user who can write there gains root at the next job: {'; '.join(untrusted[:3])}"
        found.append(Remark("fix", prefix, what, "shell", repair))
    found += [Remark("advice", "the stubs' python", note) for note in notes]
    return found or [Remark("ok", prefix, "the stubs start, and only root can change them")]
