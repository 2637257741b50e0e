"""Programs of other Slurm releases than the host's, from Debian's archive; the host stays as is.

A release is a directory ("root") of unpacked Debian packages: Slurm and the libraries it is linked
to, its C library too. Its programs name the root's own loader and library directories in their ELF
headers (patchelf), so they run beside the host's programs, and what they start is the host's. A
node binds them over the host's files of the same names in its mount namespace (`overlays`).
"""

import contextlib
import fcntl
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from lab.errors import LabError

CACHE = Path("/var/cache/robust-slurm-lab")
VARIABLE = "ROBUST_LAB_SLURM"
SUITES = {"22.05": ("bookworm",), "24.11": ("trixie",), "26.05": ("forky", "sid")}
"""The suites of Debian that serve a release, the likeliest first."""

_RECIPE = 1  # raise it when the content changes: roots of another recipe are not used
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_PACKAGES = [
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "slurmdbd",
    "slurm-wlm-mysql-plugin",
    "libslurm-dev",
    "patchelf",
]
_UNPACKED = re.compile(r"lib|slurm|zlib1g$|patchelf$")  # the rest is for a system that boots
_DAEMONS = ("slurmctld", "slurmd", "slurmstepd", "slurmdbd")
_COMMANDS = [
    "sacct",
    "sacctmgr",
    "salloc",
    "sattach",
    "sbatch",
    "sbcast",
    "scancel",
    "scontrol",
    "scrontab",
    "scrun",
    "sdiag",
    "sinfo",
    "sprio",
    "squeue",
    "sreport",
    "srun",
    "sshare",
    "sstat",
    "strigger",
]
_FIELDS = "$(REPO_URI) $(RELEASE) $(COMPONENT)"  # of apt-get indextargets
_APT_S = 200.0
_RUN_S = 60.0


class Release(NamedTuple):
    """A release as it is used: "24.11", and its root; no root: the host's own packages."""

    name: str
    root: Path | None


def asked(release: str = "") -> str:
    """Return the release that a lab is asked for: `release`, else by the environment, or ""."""
    return release or os.environ.get(VARIABLE, "")


def find(release: str) -> Release:
    """Return the release, and build its root if there is none; "" is the host's own.

    Raises LabError if there is no such release or its root cannot be built.
    """
    own = host_release()
    if release in ("", own):
        return Release(own, None)
    if release not in SUITES:
        raise LabError(f"--slurm {release}: choose from {', '.join(SUITES)} (here: {own})")
    return Release(release, build(release))


def why_not(release: str) -> str:
    """Return why the release cannot be used here; "" if it can (its root is built if needed)."""
    try:
        find(release)
    except LabError as error:
        return str(error)
    return ""


@functools.cache
def host_release() -> str:
    """Return the release of the host's own packages, "22.05"."""
    program = shutil.which("slurmd", path="/usr/sbin:/sbin")
    return version_of(Path(program)).rpartition(".")[0] if program else ""


def version_of(slurmd: Path) -> str:
    """Return what `slurmd -V` says: "24.11.5"."""
    text = _run([str(slurmd), "-V"], _RUN_S).split()
    return text[-1] if text else ""


def root_of(release: str) -> Path:
    """Return where the root of a release is, once it is built."""
    return CACHE / f"{release}-{_RECIPE}"


def build(release: str) -> Path:
    """Return the root of a release, built if it is not there; safe for several at once."""
    root = root_of(release)
    if root.is_dir():
        return root
    if os.geteuid() != 0:
        raise LabError(f"a root of Slurm {release} is built by root only")
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise LabError(f"Slurm {release} is not installed; its root is built by apt-get, on Debian")
    CACHE.mkdir(mode=0o755, parents=True, exist_ok=True)
    with _locked(CACHE / f"{release}.lock"):
        if root.is_dir():  # another process built it
            return root
        print(f"lab: building Slurm {release} in {root} (once, about 30 s)", file=sys.stderr)
        work = CACHE / f".{root.name}"
        shutil.rmtree(work, ignore_errors=True)  # of a build that was killed
        try:
            _fill(release, work, root)
            (work / "root").rename(root)
        except OSError as error:
            raise LabError(f"Slurm {release}: {error}") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return root


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock; it ends with this process, however that ends."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


# -- building -------------------------------------------------------------------------------


def _fill(release: str, work: Path, final: Path) -> None:
    mirror = _mirror()
    for suite in SUITES[release]:
        apt = _prepare(work / suite, mirror, suite)
        found = _candidate(apt)
        if found.startswith(f"{release}."):
            break
    else:
        raise LabError(f"{mirror} has no Slurm {release} in {' or '.join(SUITES[release])}")
    root = work / "root"
    root.mkdir(mode=0o755)
    _unpack(_download(apt, work / suite), root)
    _merge(root)
    _patch(root, final)


def _mirror() -> str:
    """Return the address of Debian's archive that apt is set up to use here."""
    lines = _run(["apt-get", "indextargets", "--format", _FIELDS, "Created-By: Packages"], _RUN_S)
    known = {suite for suites in SUITES.values() for suite in suites}
    known |= {"stable", "oldstable", "oldoldstable", "testing", "unstable"}
    found = pick_mirror(lines, known)
    if not found:
        raise LabError(
            "apt's sources name no archive of Debian (component main) to take Slurm from"
        )
    return found


def pick_mirror(lines: str, suites: set[str]) -> str:
    """Return the first address that serves the component main of one of the suites, or ""."""
    for line in lines.splitlines():
        words = line.split()
        if len(words) == 3 and words[1] in suites and words[2] == "main":
            return words[0]
    return ""


def _prepare(work: Path, mirror: str, suite: str) -> list[str]:
    """Set up apt with a state of its own, as on a machine without packages; return its options."""
    for name in ("lists/partial", "archives/partial", "debs"):
        (work / name).mkdir(parents=True)
    (work / "status").touch()
    signed = f" [signed-by={_KEYRING}]" if _KEYRING.exists() else ""
    (work / "sources.list").write_text(f"deb{signed} {mirror} {suite} main\n")
    settings = {
        "Dir::State": work,
        "Dir::State::Lists": work / "lists",
        "Dir::State::status": work / "status",
        "Dir::Cache": work,
        "Dir::Cache::pkgcache": "pkgcache.bin",  # container images switch these off
        "Dir::Cache::srcpkgcache": "srcpkgcache.bin",
        "Acquire::GzipIndexes": "false",
        "Dir::Etc::SourceList": work / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Etc::Preferences": "/dev/null",  # the host's pins are not about this suite
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Acquire::AllowInsecureRepositories": "false",  # what is built here runs as root
        "APT::Get::AllowUnauthenticated": "false",
        "APT::Update::Error-Mode": "any",  # without it an archive out of reach is a warning
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
        "APT::Update::Post-Invoke-Success": "",
        "Acquire::Languages": "none",
        "Acquire::Check-Valid-Until": "false",  # a snapshot of the archive stays as it was
        "Acquire::Retries": "1",
        "Acquire::http::Timeout": "10",
        "Acquire::https::Timeout": "10",
    }
    (work / "apt.conf").write_text(
        "".join(f'{key} "{value}";\n' for key, value in settings.items())
    )
    options = ["-c", str(work / "apt.conf")]
    _run(["apt-get", *options, "-q", "update"], _APT_S)
    return options


def _candidate(apt: Sequence[str]) -> str:
    text = _run(["apt-cache", *apt, "show", "--no-all-versions", "slurmd"], _RUN_S, check=False)
    found = re.search(r"^Version: (\S+)", text, re.MULTILINE)
    return found[1] if found else ""


def _download(apt: Sequence[str], work: Path) -> list[Path]:
    plan = _run(["apt-get", *apt, "-s", "install", *_PACKAGES], _APT_S)
    names = re.findall(r"^Inst (\S+)", plan, re.MULTILINE)
    wanted = [name for name in names if _UNPACKED.match(name)]
    _run(["apt-get", *apt, "-q", "download", *wanted], _APT_S, cwd=work / "debs")
    return sorted((work / "debs").glob("*.deb"))


def _unpack(packages: Sequence[Path], root: Path) -> None:
    with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
        words = [["dpkg-deb", "-x", str(package), str(root)] for package in packages]
        list(pool.map(lambda argv: _run(argv, _RUN_S), words))


def _merge(root: Path) -> None:
    """Move what older suites have in /lib (libc6) to /usr/lib, where it is in newer ones."""
    old = root / "lib"
    if old.is_dir():
        shutil.copytree(old, root / "usr/lib", symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(old)


def _patch(root: Path, final: Path) -> None:
    """Make the programs use the loader and the libraries of `final`, where the root will be."""
    plugins = plugin_dir(root)
    inside = Path("/") / plugins.relative_to(root)
    paths = f"{final}{inside}:{final}{inside.parent}"
    loader = next(iter(sorted(plugins.parent.glob("ld-linux-*.so.*"))), None)
    if loader is None:
        raise LabError(f"{plugins.parent} has no loader of programs (ld-linux-*.so.*)")
    tool = [str(loader), "--library-path", str(plugins.parent), str(root / "usr/bin/patchelf")]
    rpath = ["--force-rpath", "--set-rpath", paths]
    interpreter = ["--set-interpreter", f"{final}{inside.parent}/{loader.name}"]
    programs = [str(path) for path in programs_of(root).values()]
    _run([*tool, *interpreter, *rpath, *programs], _RUN_S)
    _run([*tool, *rpath, *map(str, sorted(plugins.glob("*.so")))], _RUN_S)


def _run(argv: Sequence[str], limit: float, *, check: bool = True, cwd: Path | None = None) -> str:
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", **_proxies()}
    try:
        done = subprocess.run(
            argv,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"{' '.join(argv)[:200]}: {error}") from error
    if check and done.returncode:
        text = (done.stderr or done.stdout).strip()[-500:]
        raise LabError(f"{' '.join(argv)[:200]}: exit code {done.returncode}: {text}")
    return done.stdout


def _proxies() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}


# -- using ----------------------------------------------------------------------------------


def plugin_dir(root: Path) -> Path:
    """Return the directory of Slurm's plugins below a root, or below "/"."""
    found = sorted(root.glob("usr/lib/*/slurm-wlm/libslurmfull.so"))
    if not found:
        raise LabError(f"{root} has no Slurm plugins (usr/lib/*/slurm-wlm)")
    return found[0].parent


def programs_of(root: Path) -> dict[str, Path]:
    """Return Slurm's programs below a root by the path at which they are called."""
    named = [(f"/usr/sbin/{name}", name) for name in _DAEMONS]
    named += [(f"/usr/bin/{name}", name) for name in _COMMANDS]
    found: dict[str, Path] = {}
    for path, name in named:
        here = (root / path[1:]).parent
        for entry in (here / f"{name}-wlm", here / name):  # -wlm: behind Debian's alternatives
            if entry.is_file() and not entry.is_symlink():
                found[path] = entry
                break
    return found


def overlays(root: Path) -> list[tuple[str, str]]:
    """Return what to bind and over which path, so that a mount namespace has the root's Slurm.

    A program that the host does not have is left out.
    """
    pairs = [
        (str(source), str(Path(path).resolve()))
        for path, source in programs_of(root).items()
        if Path(path).exists()
    ]
    return [*pairs, (str(plugin_dir(root)), str(plugin_dir(Path("/"))))]
