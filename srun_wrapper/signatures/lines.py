"""A job's log, as many ranks wrote it, as lines with rank, node and time (pure)."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from datetime import datetime

ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|\x1b\].*?(?:\x07|\x1b\\)")
HOST = r"[A-Za-z0-9][\w.-]{0,99}"
TASK = re.compile(rf"\s*(\d{{1,6}}): ?(?!\d\d:)|\[(\d{{1,6}})\] (?=\[rank|{HOST}:\d+:\d+ )")
RANK = re.compile(r"\s*\[(?:rank|default)\s?(\d{1,6})\]:? ?", re.I)
MPI = re.compile(r"\[\d+,(\d+)\]<std(?:out|err)>: ?|\[\d+,(\d+)\]\[[^\]]*\] ")
PLACE = re.compile(rf"\(({HOST})\) |\(\w+ pid=\d+(?:, ip=({HOST}))?\) ")
NCCL = re.compile(rf"\[?({HOST}):(\d+)(?: ?:\d+)?:(\d+)\]? (?:\[(\d+)\] ?)?")
MPI_HOST = re.compile(rf"\[({HOST}):\d{{2,}}\] ")
LEVEL = re.compile(
    r"\[?(?:ERROR|CRITICAL)\]?:? +(?:\d\d-\d\d [\d:]{8} )?(?:\[[\w./-]+:\d+\] )?"
    r"|\| ?ERROR +\| [^|]{0,120}? - "
)
QUOTE = re.compile(  # of a thread, of a log service, of a launcher that names the stream
    r"(?:> ?)+(?=\S)|\s*\| +(?=\d{4}-\d\d-\d\dT[^|]{5,40}\|)|\| (?=[\w.-]+:\d+:\d+ )"
    r"|(?:stdout|stderr): "
)
PDSH = re.compile(r"(?=[\w.-]{0,99}[\d-])([A-Za-z][\w.-]{0,99}): ")
SYSLOG = re.compile(
    rf"(?:<\d+>)?([A-Z][a-z]{{2}} +\d+ \d\d:\d\d:\d\d)(?:\.\d+)? ({HOST}) "
    r"(?=[\w./-]+(?:\[\d+\])?: )"
)
ISO_SYSLOG = re.compile(
    rf"(\d{{4}}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)? ({HOST}) "
    r"(?=(?:kernel|slurmd|slurmctld|systemd|nvidia\S*)(?:\[\d+\])?: )"
)
HOST_KERNEL = re.compile(r"(?=[\w.-]{0,99}[\d-])([A-Za-z][\w.-]{0,99}) (?=kernel: )")
DMESG = re.compile(
    r"\[ *(?:\d+\.\d{6}|[A-Z][a-z]{2} [A-Z][a-z]{2} +\d+ [\d:]{8} \d{4})\](?:\[ *[TC]\d+\])? ?"
)
FULL = re.compile(
    r"\[?(\d{4})[-/](\d\d)[-/](\d\d)[ T_](\d\d):(\d\d):(\d\d)"
    r"(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?(?:(?: [A-Z]{2}\d+)+(?=\]))?\]?[:,]? ?"
)
FULL_DMESG = re.compile(r"\[[A-Z][a-z]{2} ([A-Z][a-z]{2} +\d+ [\d:]{8} \d{4})\]")
GLOG = re.compile(r"\[?[EWIF](\d{3,4}) (\d\d):(\d\d):(\d\d)(?:\.\d+)?")
SUBJECT = re.compile(
    rf"(?:srun|slurmstepd|mpirun)(?:-{HOST})?: error: ({HOST}): tasks? ([\d,-]+): "
)
STEPD = re.compile(rf"slurmstepd-({HOST}): ")
RANK_INSIDE = re.compile(
    r"\[(?:PG .{0,60}?)?Rank (\d+)\]|\brank ?[:=]? ?(\d+)\b|global_rank (\d+)", re.I
)
NCCL_RANK = re.compile(r"\brank (\d+) nranks \d+")
TABLE = re.compile(rf"^\s*(host|rank)\s+: ({HOST})")
PROGRESS = re.compile(
    r"\b(?:step|iter(?:ation)?|global_step|it)s?\b[ \]\"']*[:=/# ]? *\[? *(\d{1,9})\b"
    r"|(\d{1,9})/\d+ \[\d+:\d\d",
    re.I,
)
PROMPT = re.compile(rf"\s*(?:\([\w.-]+\) )?\[?[\w.-]+@({HOST})[: ][^#$%]*[#$%]( |$)")
KERNEL = re.compile(r"NVRM: |mlx\d_core|\[Hardware Error\]|device handle for GPU")
SHELL = re.compile(  # what bash says of a program that a signal ended: the command follows
    r"\S+: line \d+: +\d+ (?:Aborted|Killed|Terminated|Segmentation fault|Bus error"
    r"|Illegal instruction|Floating point exception)(?: +\(core dumped\))?"
)
COMMAND = re.compile(r"\++ (?=\S*/|srun |python\d? |torchrun |mpirun |export |source |exec |echo )")
RETURNED = ("] exits with return code", "]' returned non-zero exit status")
NO_HOSTS = frozenset({"localhost", "127.0.0.1", "0.0.0.0"})


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line; ``text`` without labels, times and colours, ``at`` in s on the log's clock."""

    number: int  # from 1
    raw: str
    text: str
    rank: int | None = None
    task: int | None = None  # as `srun -l` labels it
    node: str = ""
    at: float | None = None
    step: int | None = None  # the training step that the line reports


def read_lines(log: str) -> list[LogLine]:
    """Return every line of the log; ranks and tasks whose node is said anywhere have it."""
    raws = log.split("\n")
    hosts = _pdsh_hosts(raws)
    year = next((int(m[1]) for raw in raws[:20000] if (m := FULL.search(raw[:80]))), 2000)
    lines = [_line(number, raw, hosts, year) for number, raw in enumerate(raws, 1)]
    return _with_nodes(lines)


def _pdsh_hosts(raws: list[str]) -> frozenset[str]:
    """Return the names that begin many lines, as pdsh labels them: no word of a program does."""
    found = Counter(m[1] for raw in raws if (m := PDSH.match(raw)))
    words = re.compile(
        r"slurmstepd|srun|mpirun|(?:step|epoch|iter|it|line|gpu|cuda|mlx\d+_|nvme|rank)[\d.]*$",
        re.I,
    )
    return frozenset(name for name, n in found.items() if n >= 3 and not words.match(name))


def _line(number: int, raw: str, hosts: frozenset[str], year: int) -> LogLine:
    plain = ANSI.sub("", raw).rstrip("\r\n ")
    parts = [part for part in plain.split("\r") if part.strip()]
    text = parts[-1] if parts else ""
    line = LogLine(number, raw, text, at=_time(text[:120], year), step=_step(text[:300]))
    for _ in range(6):
        peeled = _peel(line, hosts)
        if peeled is line:
            break
        line = peeled
    line = replace(line, text=_without_command(line.text))
    if line.node in NO_HOSTS:
        line = replace(line, node="")
    if subject := SUBJECT.search(line.text):
        line = replace(line, node=subject[1], task=_first(subject[2]))
    elif stepd := STEPD.search(line.text):
        line = replace(line, node=stepd[1])
    if line.rank is None and (inside := RANK_INSIDE.search(line.text[:300])):
        line = replace(line, rank=_int(next(filter(None, inside.groups()))))
    return line


def _without_command(text: str) -> str:
    """Take out a command line that the text repeats: its words are no errors."""
    if COMMAND.match(text):
        return ""
    if ended := SHELL.match(text):
        return ended[0]
    for words in RETURNED:
        begin, end = text.find("['"), text.rfind(words)
        if 0 <= begin < end:
            return text[: begin + 1] + text[end:]
    return text


def _peel(line: LogLine, hosts: frozenset[str]) -> LogLine:
    """Take one label from the front of a line; the same line when there is none."""
    text = line.text
    if m := QUOTE.match(text):
        return replace(line, text=text[m.end() :])
    if m := RANK.match(text):
        return replace(line, text=text[m.end() :], rank=_int(m[1]))
    if m := MPI.match(text):
        return replace(line, text=text[m.end() :], rank=_int(m[1] or m[2]))
    if line.task is None and not line.node and (m := TASK.match(text)):
        return replace(line, text=text[m.end() :], task=_int(m[1] or m[2]))
    if (m := SYSLOG.match(text)) or (m := ISO_SYSLOG.match(text)):
        return replace(line, text=text[m.end() :], node=m[2])
    if m := HOST_KERNEL.match(text):
        return replace(line, text=text[m.end() :], node=m[1])
    if m := (DMESG.match(text) or FULL.match(text)):
        return replace(line, text=text[m.end() :])
    if m := LEVEL.match(text):
        return replace(line, text=text[m.end() :])
    if (m := NCCL.match(text)) and not m[1].isdigit():
        return replace(line, text=text[m.end() :], node=m[1])
    if (m := PLACE.match(text)) or (m := MPI_HOST.match(text)):
        node = next(filter(None, m.groups()), line.node)
        return replace(line, text=text[m.end() :], node=node)
    if (m := PDSH.match(text)) and m[1] in hosts:
        return replace(line, text=text[m.end() :], node=m[1])
    return line


def _time(text: str, year: int) -> float | None:
    """Return the time that the line bears; zones are ignored, one log has one."""
    try:
        if m := FULL.search(text):
            return datetime(*(int(each) for each in m.groups())).timestamp()  # type: ignore[arg-type]
        if m := GLOG.search(text):
            day = m[1].zfill(4)
            parts = (int(day[:2]), int(day[2:]), int(m[2]), int(m[3]), int(m[4]))
            return datetime(year, *parts).timestamp()
        if m := FULL_DMESG.search(text):
            return datetime.strptime(" ".join(m[1].split()), "%b %d %H:%M:%S %Y").timestamp()
        if m := SYSLOG.search(text):
            stamp = f"{year} {' '.join(m[1].split())}"
            return datetime.strptime(stamp, "%Y %b %d %H:%M:%S").timestamp()
    except (ValueError, OverflowError, OSError):
        pass
    return None


def _step(text: str) -> int | None:
    found = PROGRESS.search(text)
    return _int(found[1] or found[2]) if found else None


def _int(text: str) -> int:
    return int(text[:9])


def _first(tasks: str) -> int | None:
    found = re.match(r"\d{1,9}", tasks)
    return int(found[0]) if found else None


def _with_nodes(lines: list[LogLine]) -> list[LogLine]:
    """Give lines the node of their rank or task, where another line names both."""
    ranks: dict[int, str] = {}
    tasks: dict[int, str] = {}
    host = shell = ""
    shells: dict[int, str] = {}  # lines of the kernel's log, read at this host's prompt
    for line in lines:
        if prompt := PROMPT.match(line.text):
            shell = prompt[1]
        elif shell and not line.node and KERNEL.search(line.raw):
            shells[line.number] = shell
        if line.node and line.task is not None:
            tasks.setdefault(line.task, line.node)
        if line.node and (m := NCCL_RANK.search(line.text)):
            ranks.setdefault(_int(m[1]), line.node)
        if m := TABLE.match(line.text):
            if m[1] == "host":
                host = m[2]
            elif host and m[2].isdigit():
                ranks.setdefault(_int(m[2]), host)
                host = ""
    for line in lines:
        if line.node and line.rank is not None and line.task is None:
            ranks.setdefault(line.rank, line.node)
    return [
        line
        if line.node
        else replace(line, node=shells[line.number])
        if line.number in shells
        else _placed(line, ranks, tasks)
        for line in lines
    ]


def _placed(line: LogLine, ranks: dict[int, str], tasks: dict[int, str]) -> LogLine:
    node = ranks.get(line.rank, "") if line.rank is not None else ""
    if not node and line.task is not None:
        node = tasks.get(line.task, "") or (ranks.get(line.task, "") if line.rank is None else "")
    return replace(line, node=node) if node else line
