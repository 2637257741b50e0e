"""Programs with other processes around them: household.py WAY; each ends well."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import here  # type: ignore[import-not-found]


def work(steps: int = 100) -> int:
    """Work a while, and return a number."""
    total = 0
    for step in range(steps):
        time.sleep(0.05)
        total += step
    return total


def helper() -> None:
    """Start a helper that leaves the session, and is gone a little later than the program."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(null, number)
            time.sleep(8)
        os._exit(0)
    os.wait()


def replaced_worker() -> None:
    """Lose a worker to SIGKILL, as to the kernel's OOM killer, and start another."""
    for number in range(2):
        worker = multiprocessing.Process(target=work, args=(40,))
        worker.start()
        if number == 0:
            time.sleep(1)
            os.kill(worker.pid or 0, signal.SIGKILL)
        worker.join()


def session() -> None:
    """Work in a child with a session of its own, and poll for its end."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(25)"],
                             start_new_session=True)  # fmt: skip
    while child.poll() is None:
        time.sleep(0.5)


def again() -> None:
    """Replace the program by itself, as some do to set variables for the loader."""
    if "AGAIN" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "AGAIN": "1"})


def silent() -> None:
    """Close standard output and error, and work on."""
    os.close(1)
    os.close(2)
    os.open(os.devnull, os.O_WRONLY)
    os.open(os.devnull, os.O_WRONLY)


def pool() -> None:
    """Work in a pool of processes."""
    with multiprocessing.Pool(3) as workers:
        workers.map(work, [40, 20, 60])


def server() -> None:
    """Serve in rank 0 until it has worked for 40 s; the other ranks wait for its end."""
    if here.RANK == 0:
        work(800)
        Path("server.done").touch()
    while not Path("server.done").exists():
        time.sleep(1)


def zombies() -> None:
    """Leave children unreaped."""
    for _ in range(5):
        subprocess.Popen(["true"])


def threads() -> None:
    """Work in threads, while the main thread waits."""
    others = [threading.Thread(target=work, args=(600,)) for _ in range(4)]
    for other in others:
        other.start()
    for other in others:
        other.join()


def kept_open() -> None:
    """Leave a child that keeps standard output open for some seconds."""
    subprocess.Popen(["sleep", "4"])


def line_of_50_mb() -> None:
    """Print a line of 50 MB."""
    for _ in range(50):
        block = memoryview(b"x" * (1 << 20))
        while block:
            block = block[os.write(1, block) :]
    os.write(1, b"\n")


def term_ignored() -> None:
    """Ignore SIGTERM and SIGINT."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def alarm() -> None:
    """Be woken by a timer, many times a second."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)  # Python restores SIGALRM's default


def renamed() -> None:
    """Change the name of the process."""
    Path("/proc/self/comm").write_text("python (a) b")


WAYS = [helper, replaced_worker, session, again, silent, pool, server, zombies, threads, kept_open]
WAYS += [line_of_50_mb, term_ignored, alarm, renamed]
if __name__ == "__main__":
    if "AGAIN" not in os.environ:
        here.started()
    {way.__name__: way for way in WAYS}[sys.argv[1]]()
    total = work()
    Path(f"total.{here.RANK}").write_text(str(total))
    print(f"rank {here.RANK} is done", flush=True)
