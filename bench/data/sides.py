"""The sides of the comparison: which can run here, in which interpreter, on which corpora."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.common import Results
from bench.data.child import Child
from bench.data.corpus import Corpus, make
from bench.data.ours import environ
from bench.data.process import Kept

RAY = os.environ.get("BENCH_RAY", "")
"""Python of an environment with ``ray[data]``; "": not compared."""
OURS, STATEFUL, DATALOADER, RAY_DATA = "ours", "stateful", "dataloader", "ray"
ROWS = 8  # of a rank's batch
WORKERS = 2  # processes of each peer's rank, as many as cores


def spec(corpus: Corpus, side: str, **more: Any) -> dict[str, Any]:
    """Return what a rank's process is told."""
    whole = {**corpus._asdict(), "root": str(corpus.root), "side": side}
    return {**whole, "rank": 0, "world": 1, "rows": ROWS, "workers": WORKERS, **more}


def child(told: Mapping[str, Any], scratch: Path, kept: Kept | None = None) -> Child:
    """Start a rank's process; ours finds a data process by ``kept``. Ray keeps its files in
    ``scratch``, not in the user's home."""
    if told["side"] == OURS:
        return Child(told, env={**environ(told), **(kept.environ if kept else {})})
    if told["side"] != RAY_DATA:
        return Child(told)
    env = {"HOME": str(scratch), "RAY_TMPDIR": str(scratch)}
    env |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    return Child(told, RAY, env)


@contextlib.contextmanager
def corpus(sources: int, files: int, documents: int) -> Iterator[Corpus]:
    """Make a corpus in a folder of its own, and remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="bench-data-") as root:
        made = Corpus(Path(root) / "corpus", sources, files, documents)
        make(made)
        yield made


def say_versions(results: Results) -> None:
    """Record the peers' versions, or that one is not there."""
    from importlib.metadata import version

    results.settings |= {name: version(name) for name in ("torch", "torchdata")}
    results.settings["ray"] = _ray_version() if RAY else "not run: BENCH_RAY names no python"


def _ray_version() -> str:
    code = "import importlib.metadata as m; print(m.version('ray'))"
    done = subprocess.run([RAY, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()
