"""Attacks that try to have root run a user's code: everything that root executes or imports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from bench.attacks.attack import Attack, Got
from bench.attacks.room import MALLORY, QUIET, Room
from bench.common import REPOSITORY, BenchError

_ROOMS = ("health", "prolog", "epilog", "templates")
_VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


def _evil(room: Room, python: bool = True) -> str:
    """Code that leaves a mark where root runs it."""
    if python:
        return f"import os\nif os.getuid() == 0: open({str(room.top)!r} + '/proof', 'w').close()\n"
    return f'#!/bin/sh\n[ "$(id -u)" = 0 ] && : >{room.top}/proof\nexit 0\n'


def _got(room: Room, said: str) -> Got:
    ran = (room.top / "proof").exists()
    line = " ".join(said.split())[-160:]
    return Got(what=f"{'root ran it' if ran else 'not run'}; {line}", succeeded=ran)


def _home(room: Room) -> Path:
    return room.directory("home", MALLORY)


def _program(path: Path, text: str, uid: int = 0) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    os.chown(path, uid, uid)
    return path


def prefix(room: Room, name: str = "prefix") -> tuple[Path, Path]:
    """Make a prefix with this clone in it, as pip installs it; return it and its site-packages."""
    top = room.directory(name)
    packages = room.directory(f"{name}/lib/{_VERSION}/site-packages")
    room.directory(f"{name}/bin")
    base = Path(os.path.realpath(sys.executable))
    (top / "bin" / "python3").symlink_to(base)
    (top / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    ignored = shutil.ignore_patterns("*.pyc.*")
    installed = Path(sysconfig.get_path("purelib"))
    for one in _ROOMS:
        place = packages / "robust_slurm" / "_rooms" / one
        shutil.copytree(REPOSITORY / one, place, ignore=ignored)
    shutil.copytree(
        REPOSITORY / "robust_slurm", packages / "robust_slurm", ignore=ignored, dirs_exist_ok=True
    )
    shutil.copytree(installed / "ClusterShell", packages / "ClusterShell", ignore=ignored)
    for path in (top, *top.rglob("*")):
        if not path.is_symlink():
            os.chown(path, 0, 0)
            path.chmod(path.stat().st_mode & ~0o022)
    return top, packages


def _install(room: Room, top: Path) -> Got:
    """Look with robust-admin, from this clone, as root: nothing is confirmed."""
    words = [
        "install",
        "--dry-run",
        "--prefix",
        str(top),
        "--etc",
        f"{room.top}/etc",
        "--tmpfiles",
        "",
    ]
    entry = [sys.executable, "-I", str(REPOSITORY / "robust_slurm" / "commands.py")]
    ended = room.program([*entry, "health.admin.cli", *words], {"PATH": "/usr/bin:/bin"})
    got = _got(room, ended.err or ended.out)
    if ended.code == 0 and not got.succeeded:
        return Got(what=f"accepted: {got.what}", succeeded=True)
    return got


def _of_prefix(change: Callable[[Room, Path, Path], object]) -> Callable[[Room], Got]:
    """An attack on a prefix that robust-admin installs from, which root must not run."""

    def attack(room: Room) -> Got:
        top, packages = prefix(room)
        change(room, top, packages)
        return _install(room, top)

    return attack


def _code_is_a_users(room: Room, top: Path, packages: Path) -> None:
    (packages / "robust_slurm" / "_rooms" / "prolog" / "__init__.py").write_text(_evil(room))
    room.own(packages / "robust_slurm" / "_rooms" / "prolog")


def _pth_of_a_user(room: Room, top: Path, packages: Path) -> None:
    (packages / "x.pth").write_text("import os; exec(" + repr(_evil(room)) + ")\n")
    os.chown(packages / "x.pth", MALLORY, MALLORY)


def _library_of_a_user(room: Room, top: Path, packages: Path) -> None:
    """The interpreter's own standard library; the interpreter itself is root's."""
    base = room.directory("base/bin")
    shutil.copy(os.path.realpath(sys.executable), base / _VERSION)
    library = room.directory(f"base/lib/{_VERSION}")
    shutil.copy(os.__file__, library)
    (library / "encodings").mkdir()
    mark = f"posix.open({str(room.top / 'proof')!r}, 65)"
    evil = f"import posix\nif posix.getuid() == 0: posix.close({mark})\n"
    (library / "encodings" / "__init__.py").write_text(evil)
    room.own(library)
    (top / "bin" / "python3").unlink()
    (top / "bin" / "python3").symlink_to(base / _VERSION)
    (top / "pyvenv.cfg").write_text(f"HOME = {base}\n")


def _empty_pycache(room: Room, top: Path, packages: Path) -> None:
    cache = packages / "robust_slurm" / "_rooms" / "prolog" / "__pycache__"
    shutil.rmtree(cache, ignore_errors=True)
    room.directory(str(cache.relative_to(room.top)), MALLORY)


def _extension_module(room: Room, top: Path, packages: Path) -> None:
    made = (
        packages
        / "robust_slurm"
        / "_rooms"
        / "prolog"
        / f"cli.{sysconfig.get_config_var('SOABI')}.so"
    )
    made.touch()
    os.chown(made, MALLORY, MALLORY)


def _module_before_ours(room: Room, top: Path, packages: Path) -> None:
    """A directory beside our packages, writable by all: of a name that is imported if it exists."""
    (packages / "_robust_extra").mkdir()
    (packages / "_robust_extra").chmod(0o777)


def _link_into_a_home(room: Room, top: Path, packages: Path) -> None:
    (packages / "pynvml.py").symlink_to(_home(room) / "pynvml.py")


def _sticky_packages(room: Room, top: Path, packages: Path) -> None:
    """Others can add to it: a yaml.py or filelock.py of theirs would be found there."""
    packages.chmod(0o1777)


def _probe(room: Room) -> Got:
    """Have the node's part of an install run a user's code before it looks."""
    code = room.directory("code")
    for name in (*_ROOMS, "robust_slurm", "ClusterShell"):
        room.directory(f"code/{name}")
        (code / name / "__init__.py").write_text(_evil(room))
    room.own(code)
    request = f"AdminRequest('install', {str(room.top / 'etc')!r}, python={sys.executable!r}, "
    text = (
        "import sys; sys.path[:0] = [" + repr(str(REPOSITORY)) + "]\n"
        "from health.admin.node import AdminRequest, perform\n"
        f"print(perform({request}dirs=({str(code)!r},))).error)\n"
    )
    ended = room.program([sys.executable, "-I", "-c", text], {"PATH": "/usr/bin:/bin"})
    return _got(room, ended.out or ended.err)


def _ssh(room: Room) -> Got:
    """The command that robust-admin starts over SSH: of a prefix that is a user's there."""
    top, packages = prefix(room)
    text = (
        "import sys; sys.path[:0] = [" + repr(str(REPOSITORY)) + "]\n"
        "from health.admin import remote, render\n"
        f"print(remote.command(render.find_prefix({str(top)!r})))\n"
    )
    made = room.program([sys.executable, "-I", "-c", text], {"PATH": "/usr/bin:/bin"})
    _code_is_a_users(room, top, packages)
    (packages / "robust_slurm" / "commands.py").write_text(_evil(room))
    room.own(packages / "robust_slurm")
    command = made.out.strip()
    if made.code:  # an older release: it has no look of its own
        command = f"{top}/bin/python3 -I -m robust_slurm.commands health.admin.node"
    ended = room.program(["/bin/sh", "-c", command], {"PATH": "/usr/bin:/bin"}, stdin="{}")
    return _got(room, ended.err)


# ---- the interpreter of the active tests


def _venv(room: Room) -> tuple[Path, Path]:
    place = str(room.top / "venv")
    argv = [os.path.realpath(sys.executable), "-m", "venv", "--without-pip", place]
    subprocess.run(argv, check=True)
    (packages,) = (room.top / "venv").glob("lib/python3*/site-packages")
    return room.top / "venv" / "bin" / "python3", packages


def _package(top: Path, room: Room) -> None:
    (top / "robust_slurm").mkdir(parents=True)
    (top / "robust_slurm" / "__init__.py").touch()
    (top / "robust_slurm" / "commands.py").write_text(_evil(room))


def _tested(room: Room, python: Path, between: Callable[[], object] = lambda: None) -> Got:
    """Look as the gate does; then, unless it refused, run the tests as the gate does."""
    from health.gate.active_answer import argv
    from health.gate.active_child import distrusted

    wrong = distrusted(str(python), 10.0)
    between()
    said = wrong
    if not wrong:
        words = argv(str(python), "quick", "n1", 5.0)
        said = room.program(words, {"PATH": "/usr/bin:/bin"}).err
    return _got(room, said)


def _editable(room: Room) -> Got:
    python, packages = _venv(room)
    source = _home(room) / "src"
    _package(source, room)
    room.own(source)
    (packages / "__editable___robust_slurm_finder.py").write_text(
        "import sys\nfrom importlib.util import spec_from_file_location as spec\n"
        "class F:\n    @staticmethod\n    def find_spec(name, path=None, target=None):\n"
        "        if name == 'robust_slurm':\n"
        f"            top = '{source}/robust_slurm'\n"
        "            paths = {'submodule_search_locations': [top]}\n"
        "            return spec(name, top + '/__init__.py', **paths)\n"
        "def install(): sys.meta_path.append(F)\n"
    )
    (packages / "__editable__.robust_slurm.pth").write_text(
        "import __editable___robust_slurm_finder as f; f.install()\n"
    )
    return _tested(room, python)


def _pth_to_come(room: Room) -> Got:
    python, packages = _venv(room)
    home = _home(room)
    (packages / "old.pth").write_text(f"{home}/gone\n")
    return _tested(room, python, lambda: room.as_user(lambda: _package(home / "gone", room)))


def _pth_code(room: Room) -> Got:
    """Code of root's own *.pth file that runs a user's file."""
    python, packages = _venv(room)
    home = _home(room)
    _program(home / "start.py", _evil(room), MALLORY)
    (packages / "site.pth").write_text(f"import os; exec(open('{home}/start.py').read())\n")
    return _tested(room, python)


def _usercustomize(room: Room) -> Got:
    """A sitecustomize of root's that is a link into a home."""
    python, packages = _venv(room)
    home = _home(room)
    (packages / "usercustomize.py").symlink_to(home / "custom.py")
    room.as_user(lambda: (home / "custom.py").write_text(_evil(room)))
    return _tested(room, python)


def _wrapper(room: Room) -> Got:
    """A shell script of root's as [active] python, which starts a user's environment."""
    home = _home(room)
    _program(home / "python", _evil(room, python=False), MALLORY)
    wrapper = _program(room.top / "python3", f'#!/bin/sh\nexec {home}/python "$@"\n')
    return _tested(room, wrapper)


# ---- commands


def _site(room: Room, *argv: str) -> Got:
    """Have the prolog run a command of [health.site.commands]."""
    words = ", ".join(f'"{word}"' for word in argv)
    room.site(
        f"disabled = {QUIET}\n[health.site.commands.own]\nargv = [{words}]\nwhere = ['prolog']\n"
    )
    ended = room.gate("prolog.cli", room.job())
    drained = room.drains()
    history = room.top / "spool" / "history.jsonl"
    told = history.read_text().rpartition("site-check-unknown")[2] if history.exists() else ""
    got = _got(room, ended.said or told[:200] or "no word")
    return Got(what=got.what, succeeded=got.succeeded or bool(drained), drained=drained)


def _users_check(room: Room) -> str:
    return str(_program(_home(room) / "check", _evil(room, python=False), MALLORY))


def _path_of_a_home(room: Room) -> Got:
    home = Path(_users_check(room)).parent
    return _site(room, "/bin/sh", "-c", f"PATH={home}:$PATH; check")


def _quoted_path(room: Room) -> Got:
    home = Path(_users_check(room)).parent
    script = _program(room.top / "check", f'#!/bin/sh\nexport PATH="{home}:$PATH"\ncheck\n')
    return _site(room, str(script))


def _case_calls(room: Room) -> Got:
    evil = _users_check(room)
    return _site(room, "/bin/sh", "-c", f"case x in x) {evil};; esac")


def _entered_home(room: Room) -> Got:
    home = Path(_users_check(room)).parent
    return _site(room, "/bin/sh", "-c", f"cd {home} && ./check")


def _interpreter_of_a_script(room: Room) -> Got:
    home = _home(room)
    shell = _program(home / "sh", _evil(room, python=False), MALLORY)
    return _site(room, str(_program(room.top / "check", f"#!{shell}\nexit 0\n")))


def _script_calls(room: Room) -> Got:
    evil = _users_check(room)
    return _site(room, str(_program(room.top / "check", f"#!/bin/sh\nset -e\n{evil} -q\n")))


def _script_to_come(room: Room) -> Got:
    """The script calls a file in a home that is made between the look and the call."""
    home = _home(room)
    late = home / "late"
    text = f"#!/bin/sh\nn=0\nuntil [ -e {late} ] || [ $n = 20 ]; do sleep 0.1; n=$((n+1)); done\n"
    script = _program(room.top / "check", f"{text}{late}\nexit 0\n")
    if os.fork() == 0:
        os.setgid(MALLORY)
        os.setuid(MALLORY)
        text = f"sleep 1; printf '%s' '{_evil(room, python=False)}' >{late}; chmod 755 {late}"
        os.execv("/bin/sh", ["sh", "-c", text])
    return _site(room, str(script))


def _slurm_bin(room: Room) -> Got:
    """[gate] slurm_bin is a directory whose scontrol is a user's; a fault has it called."""
    room.site(f"disabled = {QUIET}\n[health.disk]\npaths = ['/proc']\n")
    evil = room.directory("bin", MALLORY) / "scontrol"
    _program(evil, _evil(room, python=False), MALLORY)
    code = (
        f"import sys; sys.path[:0] = [{str(REPOSITORY)!r}]\n"
        "from health.gate.act import open_door\nfrom health.settings import load\n"
        "from health.checks import ALL\n"
        f"door = open_door(load({str(room.top / 'robust.toml')!r}, 'n1', ALL))\n"
        "try: print(door(3.0).nodes(['n1']))\n"
        "except Exception as error: print(error, file=sys.stderr)\n"
    )
    ended = room.program([sys.executable, "-I", "-c", code], {})
    if ended.code:
        raise BenchError(ended.err[-300:])
    return _got(room, ended.err)


def _attack(name: str, tries: str, run: Callable[[Room], Got]) -> Attack:
    return Attack(name=f"trust_{name}", row="user code as root", tries=tries, run=run)


ATTACKS = [
    _attack("install_code", "a package of the prefix is a user's", _of_prefix(_code_is_a_users)),
    _attack("install_pth", "a *.pth file of the prefix is a user's", _of_prefix(_pth_of_a_user)),
    _attack("install_library", "the standard library is a user's", _of_prefix(_library_of_a_user)),
    _attack("install_pycache", "an empty __pycache__ is a user's", _of_prefix(_empty_pycache)),
    _attack("install_so", "an extension module is a user's", _of_prefix(_extension_module)),
    _attack("install_beside", "a directory beside is open", _of_prefix(_module_before_ours)),
    _attack("install_link", "a module is a link into a home", _of_prefix(_link_into_a_home)),
    _attack("install_sticky", "site-packages is sticky, open to all", _of_prefix(_sticky_packages)),
    _attack("install_probe", "the probe of an install runs a user's code", _probe),
    _attack("install_ssh", "the prefix is a user's on the node", _ssh),
    _attack("active_editable", "pip install -e of a user's source", _editable),
    _attack("active_pth_to_come", "a *.pth line names what a user makes later", _pth_to_come),
    _attack("active_pth_code", "code of a *.pth file runs a user's file", _pth_code),
    _attack("active_custom", "usercustomize leads into a home", _usercustomize),
    _attack("active_wrapper", "[active] python is a script that runs a user's", _wrapper),
    _attack(
        "site_sh_c",
        "sh -c runs a user's file",
        lambda r: _site(r, "/bin/sh", "-c", _users_check(r)),
    ),
    _attack("site_sh", "sh runs a user's script", lambda r: _site(r, "/bin/sh", _users_check(r))),
    _attack(
        "site_source",
        "sh -c reads a user's file",
        lambda r: _site(r, "/bin/bash", "-c", f"set -u; . {_users_check(r)}; true"),
    ),
    _attack(
        "site_env",
        "env and timeout start a user's file",
        lambda r: _site(r, "/usr/bin/env", "-i", "timeout", "5", _users_check(r)),
    ),
    _attack("site_path", "PATH of a command names a home", _path_of_a_home),
    _attack("site_path_quoted", "PATH of a script names a home, in quotes", _quoted_path),
    _attack("site_case", "a branch of a shell's case runs a user's script", _case_calls),
    _attack("site_cd", "a command enters a home and runs what is there", _entered_home),
    _attack("site_shebang", "a script's interpreter is a user's", _interpreter_of_a_script),
    _attack("site_script", "a script of root's calls a user's file", _script_calls),
    _attack("site_to_come", "a script of root's calls what a user makes later", _script_to_come),
    _attack("slurm_bin", "scontrol in [gate] slurm_bin is a user's", _slurm_bin),
]
