"""The code that ranks run: a snapshot of the user's directory, as the node agents get it."""

from __future__ import annotations

import msgspec

from robust_slurm.auto.snapshot_paths import SOURCE, STORE, TREE


class Code(msgspec.Struct, array_like=True, frozen=True):
    """A version of the code, and what a rank's start becomes with it."""

    version: str
    source: str  # the user's directory
    store: str  # directory of all versions of the job
    tree: str  # directory of this version
    directory: str  # the ranks' working directory; "": the task's own
    command: tuple[str, ...]
    environ: dict[str, str]  # variables that name paths of the code (PYTHONPATH)

    def variables(self) -> dict[str, str]:
        """Return the variables that a rank gets."""
        own = {TREE: self.tree, STORE: self.store, SOURCE: self.source}
        return {**self.environ, **own, "ROBUST_CODE_VERSION": self.version}
