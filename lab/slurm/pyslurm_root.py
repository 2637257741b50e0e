"""A Debian of its own with Slurm 24.11 and the pyslurm of that release, to run tests in (root).

``python -m lab.slurm.pyslurm_root [--source FILE] [COMMAND…]`` builds it at first use: of Debian's
packages and of FILE, the source of pyslurm 24.11 (a tar.gz of its tag v24.11.0), in about 4 min;
``make pyslurm`` installs debootstrap for it, and has it built of a FILE beside the clone.
Then it runs COMMAND in it, in the repository; by default the contract of the door to Slurm.
pyslurm is GPL-2.0: it stays in that root, and no part of it is in this repository.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.errors import LabError
from lab.slurm.releases import CACHE, VARIABLE, _locked, _mirror

RELEASE = "24.11"
ROOT = CACHE / "pyslurm-24.11-1"  # the last number: of this recipe
REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = REPOSITORY.parent / "shared" / "vendor" / "pyslurm-24.11.0.tar.gz"  # beside the clone
CONTRACT = ["python3", "-m", "pytest", "-q", "tests/robust_slurm/slurm/test_slurm_contract.py"]
_PACKAGES = [
    *("slurmctld", "slurm-client", "slurm-wlm-basic-plugins", "libslurm-dev"),
    *("python3-dev", "python3-setuptools", "cython3", "gcc", "libc6-dev"),
    *("python3-pytest", "python3-pytest-timeout", "python3-hypothesis"),
    *("python3-msgspec", "python3-clustershell", "python3-rich"),
]
_SOURCE = "opt/pyslurm"
_LIBRARIES = "/usr/lib/x86_64-linux-gnu/slurm-wlm"
_BUILD = ["python3", "setup.py", "build_ext", "-j2", "--inplace"]
# Run by sh in namespaces of its own: nothing of it is left, whatever ends it.
_ENTER = """\
set -e
mount --make-rprivate /
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
mkdir -p "$1$2"
mount --bind "$2" "$1$2"
cd "$1$2"
root=$1; where=$2; shift 2
exec chroot "$root" sh -c 'cd "$0" && exec "$@"' "$where" "$@"
"""


def build(root: Path, source: Path | None) -> None:
    """Make the root if it is not there; safe for several at once. Raises LabError."""
    if root.is_dir():
        return
    if os.geteuid() != 0:
        raise LabError(f"{root} is not there, and is built by root only")
    if source is None or not source.is_file():
        raise LabError(f"{root} is not there: name the source of pyslurm 24.11 by --source")
    if not shutil.which("debootstrap"):
        raise LabError("debootstrap is not installed (apt-get install debootstrap)")
    work = root.with_name(f".{root.name}")
    root.parent.mkdir(parents=True, exist_ok=True)
    with _locked(root.with_name(f"{root.name}.lock")):
        if root.is_dir():  # another process built it
            return
        shutil.rmtree(work, ignore_errors=True)  # of a build that was cut off
        _install(work)
        _compile(work, source)
        work.rename(root)


def _install(work: Path) -> None:
    # Without the archive's keyring, debootstrap would only warn that it checks no signature.
    flags = ["--variant=minbase", "--force-check-gpg"]
    _run(["debootstrap", *flags, "trixie", str(work), _mirror()])
    policy = work / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")  # no daemon is started
    policy.chmod(0o755)
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "-q", "install", "-y", "--no-install-recommends", *_PACKAGES]
    _run(_entered(work, install), env)


def _compile(work: Path, source: Path) -> None:
    (work / _SOURCE).mkdir()
    into = ["-C", str(work / _SOURCE), "--strip-components=1", "--no-same-owner"]
    _run(["tar", "-xzf", str(source), *into])
    env = {"SLURM_INCLUDE_DIR": "/usr/include", "SLURM_LIB_DIR": _LIBRARIES}
    _run(_entered(work, ["sh", "-c", f'cd /{_SOURCE} && exec "$@"', "sh", *_BUILD]), env)
    path = work / "usr/lib/python3/dist-packages/pyslurm.pth"
    path.write_text(f"/{_SOURCE}\n")


def run(
    root: Path, command: Sequence[str], quiet: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the command in the root, in the repository; ``quiet``: its output is in the result."""
    (root / "etc/hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}  # its Python is another one
    env.pop(VARIABLE, None)  # its Slurm is its own
    return subprocess.run(_entered(root, command), env=env, text=True, capture_output=quiet)


def _entered(root: Path, command: Sequence[str]) -> list[str]:
    apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    return [*apart, "sh", "-c", _ENTER, "sh", str(root), str(REPOSITORY), *command]


def _run(argv: Sequence[str], env: dict[str, str] | None = None) -> None:
    done = subprocess.run(argv, env=os.environ | (env or {}), stdout=sys.stderr)
    if done.returncode != 0:
        raise LabError(f"{argv[0]} failed with exit code {done.returncode}; see above")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.slurm.pyslurm_root")
    about = "source of pyslurm 24.11 (default: %(default)s)"
    parser.add_argument("--source", type=Path, metavar="FILE", help=about, default=SOURCE)
    parser.add_argument("--root", type=Path, default=ROOT, help="default: %(default)s")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    args = parser.parse_args(argv)
    try:
        build(args.root, args.source)
    except (LabError, OSError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    return run(args.root, args.command or CONTRACT).returncode


if __name__ == "__main__":
    raise SystemExit(main())
