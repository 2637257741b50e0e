"""Build the fake NVML (lab/machine/nvml/) and make the loader find it."""

import shutil
import subprocess
from pathlib import Path

from lab import linux
from lab.errors import LabError

LIBRARY = "libnvidia-ml.so.1"
_SOURCE = Path(__file__).with_name("nvml")
_FLAGS = ["-shared", "-fPIC", "-O0", "-fvisibility=hidden", "-Wall", f"-Wl,-soname,{LIBRARY}"]
_INSTALL = "try: apt-get install gcc libc6-dev"
_BUILD_S = 20.0  # some 0.4 s on an idle core
_LDCONFIG_S = 5.0
_LDCONFIG = "/sbin/ldconfig"
_AUX = Path("/var/cache/ldconfig")


def check_compiler() -> None:
    """Raise LabError unless the library can be built here."""
    if not shutil.which("cc"):
        raise LabError(f"GPUs need a C compiler, but there is no cc; {_INSTALL}")
    if not Path(_LDCONFIG).exists():
        raise LabError(f"GPUs need {_LDCONFIG} of the GNU C library, which is not here")


def build(directory: Path) -> Path:
    """Compile the library into `directory` (it must exist); return its path."""
    check_compiler()
    target = directory / LIBRARY
    sources = [str(path) for path in sorted(_SOURCE.glob("*.c"))]
    argv = ["cc", *_FLAGS, "-o", str(target), *sources]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_BUILD_S)
    if done.returncode != 0:
        said = done.stderr.strip()[-2000:]
        raise LabError(f"cc cannot build the fake NVML ({_INSTALL}): {said}")
    return target


def make_cache(library: Path, cache: Path) -> None:
    """Write a loader cache like the host's, in which `library` comes first.

    It runs in a mount namespace of its own: ldconfig also keeps notes in /var/cache/ldconfig, and
    nothing of the host is to change.
    """
    conf = cache.with_suffix(".conf")
    conf.write_text(f"{library.parent}\ninclude /etc/ld.so.conf\n")
    argv = [_LDCONFIG, "-X", "-C", str(cache), "-f", str(conf)]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=_LDCONFIG_S, preexec_fn=_hide_notes
    )
    if done.returncode != 0 or not cache.exists():
        raise LabError(f"ldconfig failed: {done.stderr.strip()[-2000:]}")


def _hide_notes() -> None:
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    if _AUX.is_dir():
        linux.mount("tmpfs", str(_AUX), "tmpfs", linux.MS_NOSUID | linux.MS_NODEV)
