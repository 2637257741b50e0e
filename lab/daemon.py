"""Start a daemon of a lab, with a log of its own."""

import signal
import subprocess

from lab.spec import LabSpec, root_env


def start_daemon(spec: LabSpec, name: str, argv: list[str]) -> int:
    """Start a daemon of root's in a session of its own; return its pid. ``name``: of its log."""
    with spec.log(name).open("ab") as log:
        child = subprocess.Popen(
            argv,
            env=root_env(spec),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_unblock,
        )
    return child.pid


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
