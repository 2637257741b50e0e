"""The newest release of Slurm, for the demo: built at once where the package archive answers soon.

A build that takes long would make the demo long, so it ends at a deadline; then, and where there is
no way to the archive, the demo runs on the newest release that is here.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from lab.errors import LabError
from lab.slurm import releases

_REPOSITORY = Path(__file__).resolve().parents[2]
_LOOK_S = 5.0  # for one small file of the archive
_BUILD_S = 90.0  # 24 to 36 s where the archive is near
_HELPER = "/usr/lib/apt/apt-helper"  # downloads as apt is set up to, proxies included
_BUILD = "import sys; from lab.slurm.releases import build; build(sys.argv[1])"


def newest_here() -> str:
    """Return the newest release that runs here without building anything."""
    built = [release for release in releases.SUITES if releases.root_of(release).is_dir()]
    return max([releases.host_release(), *built])


def newest(say: Callable[[str], None]) -> str:
    """Return the release to run: the environment's, else the newest, built if need be.

    ``say`` gets one line if that fails.
    """
    if asked := releases.asked():
        return asked
    here, wanted = newest_here(), max(releases.SUITES)
    if here >= wanted:
        return here
    try:
        _look(wanted)
        _build(wanted)
    except (LabError, OSError) as error:
        say(f"Slurm {wanted} cannot be built here now, so this runs on {here}: {error}")
        return here
    return wanted


def _look(release: str) -> None:
    """Raise LabError unless the archive answers."""
    mirror, suite = releases._mirror().rstrip("/"), releases.SUITES[release][0]
    quick = [f"-oAcquire::{way}::Timeout=3" for way in ("http", "https")]
    with tempfile.TemporaryDirectory() as made:
        what = [f"{mirror}/dists/{suite}/InRelease", f"{made}/InRelease"]
        options = [*quick, "-oAcquire::Retries=0", "-oAPT::Sandbox::User=root"]
        releases._run([_HELPER, *options, "download-file", *what], _LOOK_S)


def _build(release: str) -> None:
    """Build the root in a process that can be ended with all that it has started."""
    argv = [sys.executable, "-c", _BUILD, release]
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, cwd=_REPOSITORY, start_new_session=True
    ) as process:
        try:
            code = process.wait(_BUILD_S)
        except subprocess.TimeoutExpired:
            raise LabError(f"its packages took longer than {_BUILD_S:.0f} s") from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    if code:
        raise LabError("the build failed; see above")
