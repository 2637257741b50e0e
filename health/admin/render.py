"""The text of the files to install: ``templates/`` filled in for one site."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from health import settings
from health.admin.install import Directory, InstallError, WantedFile
from health.admin.trust import demand
from health.admin.want import Want
from health.check import Check, Setting
from health.gate.gate import UNLOADED
from health.node import executed, trust
from health.settings_file import END
from robust_slurm import config

TMPFILES = "/etc/tmpfiles.d"
FRAGMENT = "slurm.conf.lines"
SETTINGS = "robust.toml"
_WIDTH = 96
LOAD_S = 10  # for a stub to load its packages, 0.1 s on a healthy node
_TEMPLATES = Path(__file__).resolve().parents[2] / "templates"


class Prefix(NamedTuple):
    """The installation of robust-slurm, here and on the nodes: its interpreter, the package
    directories of the stubs, all those of its environment, and the standard library."""

    python: str
    dirs: tuple[str, ...]
    sites: tuple[str, ...] = ()
    library: tuple[str, ...] = ()


class Stub(NamedTuple):
    name: str
    what: str
    module: str
    arguments: str


STUBS = (
    Stub("prolog", "Slurm's Prolog: the node's gate", "prolog.cli", ""),
    Stub(
        "epilog",
        "Slurm's Epilog: cleans up, checks the node and verifies reports against it",
        "epilog.cli",
        "",
    ),
    Stub(
        "healthcheck",
        "Slurm's HealthCheckProgram: the sweep",
        "health.sweep",
        "sys.argv[1:]",  # a person may try it with --dry-run
    ),
)


def find_prefix(prefix: str) -> Prefix:
    """The interpreter of a prefix and its package directories. Raises InstallError, also where
    others than root could change them; nothing of it is run."""
    root = Path(prefix)
    if not root.is_absolute():
        raise InstallError(f"--prefix {prefix}: give an absolute path")
    python = next((p for n in ("python3", "python") if (p := root / "bin" / n).exists()), None)
    if python is None:
        raise InstallError(
            f"--prefix {prefix}: there is no bin/python3; make one: python3 -m venv {prefix} && "
            f"{prefix}/bin/pip install 'robust-slurm[admin]'"
        )
    try:
        found = executed.of_python(str(python))
    except OSError as error:
        raise InstallError(f"{error.filename or python}: {error.strerror}") from error
    own = found.holding("robust_slurm")
    if not own:
        raise InstallError(f"{trust.absent(found)}; {prefix}/bin/pip install 'robust-slurm[admin]'")
    rooms = f"{own}/robust_slurm/_rooms"
    rooms = rooms if Path(rooms).is_dir() else own
    where = {"health": rooms, "prolog": rooms, "epilog": rooms, "robust_slurm": own}
    missing = [name for name, place in where.items() if not Path(place, name).is_dir()]
    where |= {name: found.holding(name) for name in ("ClusterShell", "pynvml")}
    missing += ["ClusterShell"] if not where["ClusterShell"] else []
    if missing:
        raise InstallError(
            f"{python} has no {', '.join(missing)}: {prefix}/bin/pip install 'robust-slurm[admin]'"
        )
    dirs = tuple(dict.fromkeys(place for place in where.values() if place))
    demand(str(python), dirs)
    return Prefix(str(python), dirs, found.sites, (*found.files, *found.library))


class Site(NamedTuple):
    """The files' inputs. ``tmpfiles`` empty: no such file; ``on_missing``: [gate]'s."""

    prefix: Prefix
    etc: str
    tmpfiles: str
    spool: str
    on_missing: str = "skip"


def node_files(site: Site, toml: str) -> list[WantedFile]:
    """The files that every node needs."""
    files = [WantedFile(f"{site.etc}/{stub.name}", _stub(stub, site), 0o755) for stub in STUBS]
    files.append(WantedFile(f"{site.etc}/{SETTINGS}", toml, 0o644, settings=True))
    if site.tmpfiles:
        text = fill("tmpfiles.j2", spool=site.spool)
        files.append(WantedFile(f"{site.tmpfiles}/robust-slurm.conf", text, 0o644))
    return files


def _stub(stub: Stub, site: Site) -> str:
    """The script that slurmd runs: a shell, which is there also while the packages are not."""
    known = {
        "load_s": LOAD_S,
        "unloaded": UNLOADED,
        "dirs": site.prefix.dirs,
        "config": f"{site.etc}/{SETTINGS}",
        **stub._asdict(),
    }
    drains = site.on_missing == "drain" and stub.name != "healthcheck"
    then = "the node is drained" if drains else "the node stays in service, unchecked"
    return fill(
        "stub.j2",
        **known,
        program=fill("gate.py.j2", **known),
        python=site.prefix.python,
        consequence=f"{then} ([gate] on_missing = {site.on_missing}); see robust-admin doctor",
        code=int(drains),
    )


def lacks(error: ModuleNotFoundError) -> str:
    """The message for a missing extra ``admin``."""
    return f"{error}: {sys.executable} -m pip install 'robust-slurm[admin]'"


def fragment(wants: Sequence[Want], asked: bool) -> str:
    """The lines for slurm.conf. Not ``asked``: only what no default of Slurm's can be."""
    needed = [want for want in wants if want.needed and (asked or want.level == "fix")]
    others = [want for want in wants if want not in needed]
    return fill("slurm.conf.j2", needed=needed, others=others, asked=asked)


def directories(site: Site) -> list[Directory]:
    wanted = [Directory(site.etc, 0o755), Directory(site.spool, 0o755)]
    return [*wanted, Directory(site.tmpfiles, 0o755)] if site.tmpfiles else wanted


# ---- robust.toml


class Key(NamedTuple):
    name: str
    value: str
    help: str


class ConfigSection(NamedTuple):
    """A table of robust.toml; without ``title`` the keys before the first table."""

    title: str
    help: Sequence[str]
    keys: Sequence[Key]
    mark: str = ""


def robust_toml(checks: Iterable[Check]) -> str:
    """robust.toml with every key of the gate, its checks and the jobs, all at their defaults."""
    sections = [ConfigSection("", [], [_job_key(name) for name in config.FIELDS])]
    for title, keys in settings.TABLES.items():
        sections.append(ConfigSection(title, [], _keys(keys)))
    sections.append(ConfigSection("xid", [settings.XID_HELP], []))
    for check in checks:
        if check.settings:
            sections.append(ConfigSection(f"health.{check.name}", [], _keys(check.settings)))
    sections.append(ConfigSection('nodes."gpu[1-8]".gate', [settings.NODES_HELP], [], mark="# "))
    return fill("robust.toml.j2", sections=sections, end=END)


def _keys(table: Mapping[str, Setting]) -> list[Key]:
    return [
        Key(name, toml_value(setting.default), _help(setting.help, setting.unit))
        for name, setting in table.items()
    ]


def _job_key(name: str) -> Key:
    field = config.FIELDS[name]
    default = field.default if not isinstance(field.default, Path) else str(field.default)
    words = field.metadata["help"]
    if field.metadata["choices"]:
        words += f" ({' or '.join(json.dumps(choice) for choice in field.metadata['choices'])})"
    if name == "state_dir":
        words += "; the gate needs an absolute path, the same on all nodes"
    return Key(name, toml_value(default), _help(words, field.metadata["unit"]))


def _help(text: str, unit: str) -> str:
    return f"{text} [{unit}]" if unit else text


def toml_value(value: Any) -> str:
    """A default as TOML. Its strings, numbers and lists are JSON's."""
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {', '.join(pairs)} }}" if value else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    return json.dumps(value, ensure_ascii=False)


def _comment(text: str) -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )


def fill(template: str, **values: object) -> str:
    """A file of ``templates/`` with these values. Raises InstallError without jinja2."""
    try:
        import jinja2  # here, so that the doctor and --help do without
    except ModuleNotFoundError as error:
        raise InstallError(lacks(error)) from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["comment"] = _comment
    environment.filters["literal"] = json.dumps
    environment.filters["quoted"] = shlex.quote
    return environment.get_template(template).render(**values)
