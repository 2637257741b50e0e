"""An interpreter with the peers in it: a virtual environment of its own, made when asked for.

It lies in the user's cache directory and shares torch with ours, so that all are measured with one
torch. NVRx has wheels for Python 3.12 and newer C libraries only; what is used of it here is pure
Python, so its wheel is unpacked instead of installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from bench.common import REPOSITORY

PACKAGES = {
    "dlrover": ("dlrover", "kubernetes", "tornado", "grpcio", "protobuf"),
    "nvidia-resiliency-ext": ("psutil", "pyyaml", "numpy", "packaging"),
}
UNPACKED = "nvidia-resiliency-ext"
WHEEL = ("--python-version", "3.12", "--platform", "manylinux_2_39_x86_64")
SAVERS = {
    "dlrover": ("dlrover",),
    "nvidia-resiliency-ext": ("nvrx", "nvrx_async"),
}
NEEDED = {
    "dlrover": "dlrover.trainer.torch.flash_checkpoint.ddp",
    "nvidia-resiliency-ext": "bench.checkpoint.saving.nvrx",
}
LIMIT = 1200.0


class Peers:
    """The peers' interpreter; ``versions`` of those that can be imported there, ``missing`` says
    of the others why not."""

    def __init__(self) -> None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self._directory = Path(cache) / "robust-slurm" / "bench-checkpoint"
        self.python = self._directory / "bin" / "python"
        self.versions: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        for peer in PACKAGES:
            try:
                self._make()
                if self._try(peer):
                    self._install(peer)
                if why := self._try(peer):
                    raise OSError(f"it is installed but cannot be imported: {why}")
                self.versions[peer] = self._version(peer)
            except (OSError, subprocess.SubprocessError) as error:
                stderr = getattr(error, "stderr", "") or ""
                self.missing[peer] = f"{error} {stderr.strip()[-300:]}".strip()

    def savers(self) -> list[str]:
        """Names in ``driver.SAVERS`` that can be run."""
        return [saver for peer in self.versions for saver in SAVERS[peer]]

    def _make(self) -> None:
        if not self.python.exists():
            print(f"making {self._directory}", file=sys.stderr)
            self._directory.parent.mkdir(parents=True, exist_ok=True)
            self._run(sys.executable, "-m", "venv", str(self._directory))
        ours = sysconfig.get_paths()["purelib"]  # another checkout may have made it
        (self._site() / "zz-bench.pth").write_text(f"{ours}\n")

    def _site(self) -> Path:
        code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        return Path(self._run(str(self.python), "-c", code).strip())

    def _install(self, peer: str) -> None:
        print(f"installing {peer} there", file=sys.stderr)
        pip = (str(self.python), "-m", "pip", "--disable-pip-version-check")
        self._run(*pip, "install", "--quiet", *PACKAGES[peer])
        if peer == UNPACKED:
            with tempfile.TemporaryDirectory() as name:
                only = ("--no-deps", "--only-binary=:all:", *WHEEL, "--dest", name)
                self._run(*pip, "download", "--quiet", *only, peer)
                for wheel in Path(name).glob("*.whl"):
                    with zipfile.ZipFile(wheel) as archive:
                        archive.extractall(self._site())

    def _try(self, peer: str) -> str:
        """Import it: "" or why it cannot be."""
        try:
            self._run(str(self.python), "-c", f"import {NEEDED[peer]}")
        except subprocess.CalledProcessError as error:
            return str(error.stderr).strip().rpartition("\n")[2]
        return ""

    def _version(self, peer: str) -> str:
        code = f"import importlib.metadata as m; print(m.version({peer!r}))"
        return self._run(str(self.python), "-c", code).strip()

    def _run(self, *argv: str) -> str:
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(
            argv, env=env, check=True, capture_output=True, text=True, timeout=LIMIT
        )
        return done.stdout
