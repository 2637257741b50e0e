"""A second user of a lab, for tests of what users can do to each other."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from lab import Lab

RIVAL = 20002


def add_rival(lab: Lab) -> None:
    """Make the user known on all nodes."""
    for name in ("passwd", "group"):  # in place: the nodes have these very files mounted
        with (lab.spec.dir / "etc" / name).open("a") as file:
            file.write(
                f"rival:x:{RIVAL}:" + (f"{RIVAL}::/:/bin/sh\n" if name == "passwd" else "\n")
            )


def run_as(
    lab: Lab, uid: int, home: Path, argv: Sequence[str], text: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command on the login node as the lab's user or as the rival."""
    become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    name = lab.user if uid == lab.uid else "rival"
    env = {"USER": name, "LOGNAME": name, "HOME": str(home)}
    return lab.exec("head", [*become, *argv], user=False, env=env, input=text, cwd=home)
