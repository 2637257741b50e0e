"""The SPANK plugin for a site: compiled for its Slurm, and the lines that its own files need.

Slurm's files and the site's lua files are never written: what they lack is shown as a diff.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from health.admin.install import Directory, InstallError, WantedFile
from health.admin.trust import demand_program

OBJECT = "spank_robust.so"
STACK = "plugstack.conf"
LUA = "robust.lua"
_SOURCES = Path(__file__).resolve().parents[2] / "templates"
_BUILD_S = 60.0
_BUILT_FOR = re.compile(rb"robust-built-for:0x([0-9a-f]+):")
_CALL = {
    "cli_filter.lua": ("slurm_cli_pre_submit", "cli_pre_submit", ("options", "pack_offset")),
    "job_submit.lua": (
        "slurm_job_submit",
        "job_submit",
        ("job_desc", "part_list", "submit_uid"),
    ),
}
_OTHERS = {
    "cli_filter.lua": (
        "slurm_cli_setup_defaults(options, early)",
        "slurm_cli_post_submit(pack_offset, job_id, step_id)",
    ),
    "job_submit.lua": ("slurm_job_modify(job_desc, job_rec, part_list, modify_uid)",),
}


class Lines(NamedTuple):
    """A file of the site, and the lines that it lacks: a diff, or the line to paste."""

    file: str
    text: str


def directory(etc: str) -> str:
    """Return the plugin's own directory: its manifest is not the gate's."""
    return f"{etc}/plugin"


def files(etc: str, prefix: str, include: str = "") -> list[WantedFile]:
    """Return the files to install; the object first, so that no list of plugins names none.

    ``include``: the directory that holds slurm/spank.h; "": where the compiler looks.
    """
    program = f"{prefix}/bin/robust-srun"
    if not os.access(program, os.X_OK):
        raise InstallError(f"{program} is missing: {prefix}/bin/pip install robust-slurm")
    if re.search(r"[\s#]", program + etc):
        raise InstallError(f"{program}, {etc}: plugstack.conf takes no path with blanks or #")
    top = directory(etc)
    stack = (
        "# Written by `robust-admin install --plugin`. Slurm's plugstack.conf includes this file.\n"
        f"optional {top}/{OBJECT} robust_srun={program}{_python(program)}\n"
    )
    return [
        WantedFile(f"{top}/{OBJECT}", compiled(include), 0o755),
        WantedFile(f"{top}/{LUA}", (_SOURCES / "robust.lua").read_text("utf-8"), 0o644),
        WantedFile(f"{top}/{STACK}", stack, 0o644),
    ]


def _python(program: str) -> str:
    """Return the plugin's word for the Python in the program's first line; "": none is named.

    The job's PYTHONHOME and PYTHONPATH are for that of the ranks.
    """
    try:
        first = Path(program).read_bytes()[:256].split(b"\n")[0].decode()
    except (OSError, UnicodeDecodeError):
        return ""
    named = re.fullmatch(r"#!\s*(/\S+/python[\d.]*)\s*", first)
    return f" python={named[1]}" if named and os.access(named[1], os.X_OK) else ""


def directories(etc: str) -> list[Directory]:
    return [Directory(etc, 0o755), Directory(directory(etc), 0o755)]


def compiled(include: str = "") -> str:
    """Compile the plugin; returns its bytes as text (surrogateescape). Raises InstallError."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise InstallError("there is no C compiler (cc, gcc); install gcc here, not on the nodes")
    own = include or _beside_slurm()
    demand_program(compiler, "the compiler")
    if own:
        demand_program(f"{own}/slurm/spank.h", "the header")
    # Nothing of our environment: TMPDIR, CPATH and others could name a user's directory.
    env = {"PATH": f"{os.path.dirname(compiler)}:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}  # noqa: PTH120
    shared = "/run" if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="robust-plugin-", dir=shared) as made:
        out = Path(made) / OBJECT
        argv = [compiler, "-std=gnu99", "-O2", "-Wall", "-fPIC", "-shared", "-s"]
        argv += [f"-I{own}"] if own else []
        argv += ["-o", str(out), str(_SOURCES / "spank_robust.c")]
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=_BUILD_S, env=env | {"TMPDIR": made}
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InstallError(f"{compiler}: {error}") from error
        if done.returncode:
            said = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
            raise InstallError(
                f"the plugin cannot be compiled: {said}; it needs Slurm's headers (Debian: "
                "libslurm-dev, RPM: slurm-devel), or --slurm-include=DIR with slurm/spank.h in it"
            )
        return out.read_bytes().decode("utf-8", "surrogateescape")


def _beside_slurm() -> str:
    """Return the include directory of a Slurm with a prefix of its own; "": the system's."""
    command = shutil.which("srun")
    if command is None:
        return ""
    own = Path(os.path.realpath(command)).parents[1] / "include"
    found = (own / "slurm" / "spank.h").is_file() and str(own) != "/usr/include"
    return str(own) if found else ""


def built_for(text: str) -> tuple[int, int] | None:
    """Return the Slurm release that the object is for: (22, 5); None: it is no plugin of ours."""
    found = _BUILT_FOR.search(text.encode("utf-8", "surrogateescape"))
    if found is None:
        return None
    number = int(found[1], 16)
    return number >> 16 & 0xFF, number >> 8 & 0xFF


def release_text(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]:02d}"


# ---- the site's own files


def slurm_dir(config: Mapping[str, str]) -> Path:
    """Return the directory of slurm.conf, where Slurm looks for the other files."""
    return Path(config.get("SLURM_CONF") or "/etc/slurm/slurm.conf").parent


def include_line(etc: str) -> str:
    return f"include {directory(etc)}/{STACK}"


def includes(text: str, etc: str) -> bool:
    """Return whether a plugstack.conf leads to the plugin."""
    wanted = (include_line(etc).split(), ["optional", f"{directory(etc)}/{OBJECT}"])
    return any(line.split()[:2] in wanted for line in text.splitlines())


def site_lines(etc: str, config: Mapping[str, str]) -> list[Lines]:
    """Return what the site's files lack. ``config``: ``scontrol show config``; may be empty."""
    top, found = slurm_dir(config), list[Lines]()
    stack = top / STACK
    there = _read(stack)
    if not includes(there, etc):
        found.append(Lines(str(stack), _diff(stack, there, f"{there}{include_line(etc)}\n")))
    filters = [w for w in config.get("CliFilterPlugins", "").split(",") if w and w != "(null)"]
    if "lua" not in filters and "cli_filter/lua" not in filters:
        line = f"CliFilterPlugins={','.join([*filters, 'lua'])}\n"
        found.append(Lines("slurm.conf", line))
    found += _lua(top / "cli_filter.lua", etc)
    submits = config.get("JobSubmitPlugins", "").split(",")
    if "lua" in submits or "job_submit/lua" in submits:
        found += _lua(top / "job_submit.lua", etc)
    return found


def _lua(path: Path, etc: str) -> list[Lines]:
    there = _read(path)
    if f"{directory(etc)}/{LUA}" in there:
        return []
    return [Lines(str(path), _diff(path, there, with_call(path.name, there, etc)))]


def with_call(name: str, text: str, etc: str) -> str:
    """Return a site's lua file (``text``; "": none) with the call of our module.

    The calls are protected: a module that is missing or broken changes no job.
    """
    function, ours, arguments = _CALL[name]
    load = f'local has_robust, robust = pcall(dofile, "{directory(etc)}/{LUA}")\n'
    told = "slurm.log_info" if name == "cli_filter.lua" else None
    call = [
        "\tif has_robust then",
        f"\t\tlocal done, told = pcall(robust.{ours}, %s)",
        *([f'\t\tif done and told then {told}("%s", told) end'] if told else []),
        "\tend",
    ]
    head = re.search(rf"^[ \t]*function[ \t]+{function}[ \t]*\(([^)]*)\).*\n", text, re.MULTILINE)
    if head is not None:
        first = head[1].split(",")[0].strip() or arguments[0]
        lines = "\n".join([call[0], call[1] % first, *call[2:]]) + "\n"
        return load + text[: head.end()] + lines + text[head.end() :]
    body = "\n".join([call[0], call[1] % arguments[0], *call[2:]])
    made = [f"function {function}({', '.join(arguments)})\n{body}\n\treturn slurm.SUCCESS\nend\n"]
    if not text:
        made += [f"function {other}\n\treturn slurm.SUCCESS\nend\n" for other in _OTHERS[name]]
    return load + text + "\n" + "\n".join(made)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _diff(path: Path, before: str, after: str) -> str:
    names = (str(path) if before else "/dev/null", str(path))
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), *names, lineterm="")
    return "".join(f"{line}\n" for line in lines)
