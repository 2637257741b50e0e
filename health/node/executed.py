"""The paths that root executes or imports: of a Python, of a command, of Slurm's commands.

Nothing is run to find them. ``health.node.trust`` looks who could change them.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_LINKS = 40  # as the kernel's own limit
_MOST = 1 << 20  # bytes read of a script, or of a *.pth file
_SCRIPTS = 20  # that call one another
_VERSION = re.compile(r"python(\d+\.\d+)")
_PACKAGES = ("site-packages", "dist-packages")
# Programs that run those that their words name.
_RUNNER = re.compile(
    r"(ba|da|k|z|c|tc|fi|a)?sh|busybox|env|timeout|nice|ionice|nohup|setsid|stdbuf|sudo|runuser|su|"
    r"flock|xargs|time|chrt|taskset|numactl|(python|perl|ruby|lua|tclsh|node|php|[gmn]?awk)[\d.]*"
)
_PATH = re.compile(r"(?<![\w.$}~*?/-])/[\w.+@%,/-]*\w")
# PATH, LD_LIBRARY_PATH, PYTHONPATH: directories of programs and code.
_SEARCHED = re.compile(r"\b(?:\w*PATH|LD_PRELOAD|LD_AUDIT)=([^\s;&|]+)")
_ENTERED = re.compile(r"\b(?:cd|pushd)\s+(/[\w.+@%,/-]*)")
# The text before a path that a shell executes.
_EXECUTES = re.compile(
    r"(^|[;&|(){`!\n])\s*((then|do|else|elif|if|while|until|exec|eval|source|command|\.|"
    + rf"(/\S*/)?({_RUNNER.pattern})"
    + r")\s+((-\S+|\d\S*|\w+=\S*)\s+)*)*$"
)


class PythonFiles(NamedTuple):
    """The files that an interpreter executes with ``-I -S``, and the places of its packages.

    ``closed``: directories in which it looks for more, so that nothing may come there.
    """

    program: str
    files: tuple[str, ...]
    closed: tuple[str, ...]
    library: tuple[str, ...]
    sites: tuple[str, ...]

    def holding(self, module: str) -> str:
        """Return the first of ``sites`` that has a module; "": none has."""
        names = (f"{module}/__init__.py", f"{module}.py")
        return next((s for s in self.sites if any(Path(s, n).is_file() for n in names)), "")

    @property
    def editable(self) -> str:
        """The place of a *.pth file that finds robust-slurm by code of its own; "": none."""
        found = (p for s in self.sites for p in Path(s).glob("__editable__*robust_slurm*.pth"))
        return next((str(path) for path in found), "")


def of_python(program: str) -> PythonFiles:
    """Find an interpreter's files. Raises OSError, with place and reason.

    Code in *.pth files is never run: with ``-S`` there is no ``site``.
    """
    links = _chain(program)
    with open(os.open(links[-1], os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if file.read(2) == b"#!":
            text = "is a script, and hides what it runs: name the interpreter itself"
            raise OSError(errno.ENOEXEC, text, program)
    starts = list(dict.fromkeys(os.path.dirname(link) for link in links))  # noqa: PTH120
    above = [os.path.dirname(place) for place in starts]  # noqa: PTH120
    configs = [f"{place}/pyvenv.cfg" for place in dict.fromkeys([*above, *starts])]
    configs = [path for path in configs if os.path.lexists(path)]
    settings = [pair for path in configs for pair in _pairs(path)]
    homes = [os.path.realpath(value) for key, value in settings if key == "home"]
    # A pyvenv.cfg beside the program as it is called says where its library is.
    own = homes and configs[0] in (f"{above[0]}/pyvenv.cfg", f"{starts[0]}/pyvenv.cfg")
    homes += [] if own else [starts[-1]]
    version = _version(links, homes)
    looked = [_base(at, version) for at in dict.fromkeys(homes)]
    bases = list(dict.fromkeys(base for base, _ in looked if base))
    if not bases:
        raise OSError(errno.ENOENT, "its standard library does not lie beside it", program)
    libs = _there(*(f"{base.rstrip('/')}/{lib}" for base in bases for lib in ("lib", "lib64")))
    passed = [place for base, places in looked if base for place in places]
    short = version.replace(".", "")
    patterns = [f"python{version}", f"python{short}.zip", "libpython*"]
    library = [str(p) for lib in libs for name in patterns for p in Path(lib).glob(name)]
    library += [
        str(p)
        for lib in libs
        if not lib.startswith(("/usr/lib", "/lib"))
        for p in Path(lib).glob("*.so*")
    ]
    tops = [os.path.dirname(path) for path in configs]  # noqa: PTH120
    if not tops or ("include-system-site-packages", "true") in settings:
        tops += [*bases, *(["/usr/local"] if "/usr" in bases else [])]
    return PythonFiles(
        program,
        (program, *configs),
        tuple(dict.fromkeys([*starts, *above, *libs, *passed])),
        tuple(dict.fromkeys(library)),
        tuple(_sites(tops, version)),
    )


def of_command(argv: Sequence[str]) -> list[str]:
    """List the files that a command executes, as far as they are named by absolute paths.

    The program, the interpreter of a script, and whatever stands where a command does in the script
    or in the words of a shell, be it there or not. Data are not looked at: they may be a user's, or
    on a file system that does not answer.
    """
    found = dict.fromkeys([argv[0]])
    runs = _RUNNER.fullmatch(os.path.basename(os.path.realpath(argv[0])))  # noqa: PTH119
    runs = runs or _RUNNER.fullmatch(os.path.basename(argv[0]))  # noqa: PTH119
    texts = [" ".join(argv)] if runs else []
    todo = [argv[0]]
    while todo or texts:
        if todo:
            texts += _script(todo.pop())
            continue
        for path in _named(texts.pop()):
            if path not in found and len(found) < _SCRIPTS * 10:
                found[path] = None
                todo += [path] if len(found) < _SCRIPTS else []
    return list(found)


def names_more(argv: Sequence[str]) -> bool:
    """Report whether a command may execute other files than its program: a script or a shell."""
    return bool(_RUNNER.fullmatch(os.path.basename(argv[0])) or _script(argv[0]))  # noqa: PTH119


def of_slurm(directory: str) -> tuple[list[str], list[str]]:
    """The files of Slurm's commands in a directory, and the directories that they load from."""
    names = ("scontrol", "squeue", "sinfo", "sacct", "sacctmgr", "srun", "sbatch", "scancel")
    files = [path for name in names if os.path.exists(path := f"{directory}/{name}")]  # noqa: PTH110
    if not files or directory in ("/usr/bin", "/bin", "/usr/sbin", "/sbin"):
        return files, []
    top = os.path.dirname(os.path.realpath(files[0]).rpartition("/")[0])  # noqa: PTH120
    libs = _there(*(f"{top}/{lib}{below}" for lib in ("lib", "lib64") for below in ("", "/slurm")))
    return files, [directory, *libs] if top != "/usr" else [directory]


# ---- a Python


def _chain(path: str) -> list[str]:
    """The path, and where each link leads."""
    found = [os.path.abspath(path)]  # noqa: PTH100
    while os.path.islink(found[-1]):  # noqa: PTH114
        if len(found) > _LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = os.readlink(found[-1])  # noqa: PTH115
        found.append(os.path.join(os.path.dirname(found[-1]), target))  # noqa: PTH118, PTH120
    return [*found, os.path.realpath(path)]


def _pairs(config: str) -> list[tuple[str, str]]:
    pairs = [line.partition("=") for line in _read(config).splitlines()]
    return [(key.strip().lower(), value.strip()) for key, _, value in pairs]


def _version(links: Sequence[str], homes: Sequence[str]) -> str:
    """The version that the program's name says, or the only library beside it."""
    for link in reversed(links):
        if named := _VERSION.fullmatch(os.path.basename(link)):  # noqa: PTH119
            return named[1]
    beside = {
        named[1]
        for home in homes
        for path in Path(home).parent.glob("lib*/python*/os.py")
        if (named := _VERSION.fullmatch(path.parent.name))
    }
    if len(beside) == 1:
        return beside.pop()
    text = "its standard library does not lie beside it, or more than one does"
    raise OSError(errno.ENOENT, text, links[0])


def _base(home: str, version: str) -> tuple[str, list[str]]:
    """The nearest directory above a program that has its standard library, as Python looks, and
    the directories in which it might appear before; "" if there is none."""
    passed: list[str] = []
    for top in (home, *map(str, Path(home).parents)):
        libs = [f"{top.rstrip('/')}/{lib}/python{version}" for lib in ("lib", "lib64")]
        if any(os.path.lexists(f"{lib}/os.py{c}") for lib in libs for c in ("", "c")):
            return top, passed
        passed += _there(top, *(os.path.dirname(lib) for lib in libs), *libs)  # noqa: PTH120
    return "", passed


def _sites(tops: Sequence[str], version: str) -> Iterator[str]:
    """The package directories of an environment, with those that lines of its *.pth files name."""
    seen: set[str] = set()
    patterns = [f"lib*/python{version}/{name}" for name in _PACKAGES]
    for top in tops:
        for pattern in [*patterns, "lib/python3/dist-packages"]:
            for site in sorted(map(str, Path(top).glob(pattern))):
                for place in (site, *_pth(site)):
                    if os.path.realpath(place) not in seen:
                        seen.add(os.path.realpath(place))
                        yield place


def _pth(site: str) -> list[str]:
    """The directories that are there and that *.pth files name, as the site module reads them."""
    found = []
    for path in sorted(Path(site).glob("*.pth")):
        lines = [line.strip() for line in _read(str(path)).splitlines()]
        named = [os.path.join(site, line) for line in lines if line and line[0] != "#"]  # noqa: PTH118
        found += [place for place in named if os.path.isdir(place)]  # noqa: PTH112
    return found


def _there(*paths: str) -> list[str]:
    return [path for path in paths if os.path.isdir(path)]  # noqa: PTH112


def _read(path: str, most: int = _MOST) -> str:
    """The text of a regular file; "": of anything else."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return ""
        return file.read(most).decode("utf-8", "replace")


# ---- a command


def _script(path: str) -> list[str]:
    """The text of a script, its first line too; nothing of a binary, or of what is not there."""
    try:
        if "\0" in _read(path, 1024):
            return []
        return [_read(path)]
    except OSError:
        return []


def _named(text: str) -> Iterator[str]:
    """The paths that a shell's text executes, or may."""
    first, _, rest = text.partition("\n")
    if first.startswith("#!"):
        yield from _PATH.findall(f" {first[2:]}")
        text = rest
    text = "\n".join(line for line in text.split("\n") if not line.lstrip().startswith("#"))
    text = text.replace("\\\n", "  ")
    for searched in _SEARCHED.findall(text.replace('"', "").replace("'", "")):
        yield from (place for place in searched.split(":") if place.startswith("/"))
    text = text.replace('"', " ").replace("'", " ")
    if "./" in text:
        yield from _ENTERED.findall(text)
    for found in _PATH.finditer(text):
        before = text[max(0, found.start() - 200) : found.start()].rpartition("\n")[2]
        if _EXECUTES.search(before) and not before.rstrip().endswith(">"):
            yield found[0]
