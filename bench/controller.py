"""The controller hooks: what they cost slurmctld, and when a requeued job starts again.

``python -m bench.controller``: a slurmctld without nodes (``lab/slurm/controller.py``). Cases:
``cost`` the time that slurmctld waits for the script, and the CPU time of the process behind it,
for a plain job; ``requeue`` from ``scontrol requeue`` to the second run, by the hook, by the script
of robust-srun's helper job (as if it had found a free CPU at once), and by Slurm alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from bench.common import MIN_SAMPLES, REPOSITORY, BenchError, Results, main
from health.admin import controller, render
from health.controller.records import USED
from lab.slurm.controller import Controller
from robust_slurm.slurm import Slurm
from srun_wrapper.requeue.requeue import REVOKED, helper_script

ASLEEP = "#!/bin/sh\nexec sleep 600\n"
LONGEST_S = 200.0


def install(etc: Path, state_dir: Path, slurm_conf: str, slurm_bin: str = "") -> Path:
    """Write the hook of this checkout and its robust.toml below ``etc``; returns the script."""
    dirs = (str(REPOSITORY), sysconfig.get_path("purelib"))
    prefix = render.Prefix(sys.executable, dirs)
    [file] = controller.files(str(etc), prefix, {"SLURM_CONF": slurm_conf})
    path = Path(file.path)
    path.parent.mkdir(parents=True)
    path.write_text(file.text)
    path.chmod(file.mode)
    settings = f'state_dir = "{state_dir}"\n[gate]\nslurm_bin = "{slurm_bin}"\n'
    (etc / render.SETTINGS).write_text(settings)
    return path


def cost(results: Results) -> None:
    """Milliseconds that slurmctld waits, and of CPU time behind it, at the end of a plain job."""
    waited: list[float] = []
    used: list[float] = []
    with tempfile.TemporaryDirectory() as made, Controller(1) as alone:
        state = Path(made) / "state"
        (state / "jobs").mkdir(parents=True)
        (state / "jobs").chmod(0o1777)
        script = install(Path(made) / "etc", state, alone.env["SLURM_CONF"], alone.commands)
        behind = Path(made) / "behind"
        # The same, but for its last line: in the foreground.
        text = script.read_text().replace('setsid sh -c \'"$@" ', 'exec sh -c \'exec "$@" ')
        behind.write_text(text.replace("2>&1 &' sh", "2>&1' sh"))
        behind.chmod(0o755)
        slurm = Slurm(environ={**os.environ, **alone.env})
        job = slurm.submit(ASLEEP, args=["-N1"])
        slurm.cancel(job)
        env = {
            "SLURM_JOB_ID": str(job),
            "SLURM_JOB_UID": str(os.getuid()),
            "SLURM_JOB_GID": str(os.getgid()),
            "SLURM_SCRIPT_CONTEXT": "epilog_slurmctld",
        }
        for run in range(_runs(results) + 1):
            before, _ = _run(behind, env)
            wait = _run(script, env)[1]
            time.sleep(0.5)  # for the process that was left behind
            if run:  # the first warms caches
                waited.append(wait * 1000)
                used.append(before * 1000)
    results.add("cost.slurmctld_waits_ms", waited, "ms")
    results.add("cost.cpu_ms", used, "ms")


def _run(script: Path, env: Mapping[str, str]) -> tuple[float, float]:
    """Run it as slurmctld does, to the end of its output: seconds of CPU time, and until then."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [str(script)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=dict(env)
    )
    if process.stdout is None or process.stdout.read() != b"":
        raise BenchError(f"{script} printed something")
    _, status, usage = os.wait4(process.pid, 0)
    took = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise BenchError(f"{script} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, took


def requeue(results: Results) -> None:
    """Seconds from the requeue of a job to its second run, in Slurm's whole seconds."""
    runs = _runs(results)
    found: dict[str, list[float]] = {"hook": [], "helper": [], "slurm": []}
    with tempfile.TemporaryDirectory() as made:
        jobs = Path(made) / "state" / "jobs"
        jobs.mkdir(parents=True)
        jobs.chmod(0o1777)
        hook = controller.path(f"{made}/etc")
        with Controller(2 * runs + 4, f"EpilogSlurmctld={hook}\n") as alone:
            # slurmctld has looked for the script at its start already.
            install(Path(made) / "etc", jobs.parent, alone.env["SLURM_CONF"], alone.commands)
            alone.stop()
            alone.start()
            env = {**os.environ, **alone.env}
            slurm = Slurm(environ=env)
            plain = _running(slurm, runs)
            since = [_requeued(slurm, job) for job in plain]
            for _ in range(runs):
                [job] = _running(slurm, 1)
                (jobs / str(job) / USED).mkdir(parents=True)
                found["hook"].append(_again(slurm, job, _requeued(slurm, job)))
                [job] = _running(slurm, 1)
                script = helper_script(str(job), [f"StartTime=now+{REVOKED}"], 0)
                with subprocess.Popen(["sh", "-c", script], env=env):
                    found["helper"].append(_again(slurm, job, _requeued(slurm, job)))
            for job, begun in zip(plain, since, strict=True):
                found["slurm"].append(_again(slurm, job, begun))
    for by, samples in found.items():
        results.add(f"requeue.{by}_s", samples, "s")
    results.ratio("requeue: hook/slurm", "requeue.hook_s", "requeue.slurm_s")


def _running(slurm: Slurm, count: int) -> list[int]:
    jobs = [slurm.submit(ASLEEP, args=["-N1"]) for _ in range(count)]
    for job in jobs:
        until_made(partial(_has_nodes, slurm, job))
    return jobs


def _has_nodes(slurm: Slurm, job: int) -> bool:
    return slurm.job(job).state == "CONFIGURING"


def _requeued(slurm: Slurm, job: int) -> float:
    slurm.requeue(job)
    return time.time()


def _again(slurm: Slurm, job: int, since: float) -> float:
    """Return how long it took until the job had nodes again; the job is cancelled."""
    started: list[float] = []

    def runs() -> bool:
        seen = slurm.job(job)
        if seen.state != "CONFIGURING" or seen.restarts != 1 or seen.start_time is None:
            return False
        started.append(seen.start_time)
        return True

    until_made(runs)
    slurm.cancel(job)
    return max(0.0, started[0] - since)


def until_made(true: Callable[[], bool]) -> None:
    until = time.monotonic() + LONGEST_S
    while not true():
        if time.monotonic() > until:
            raise BenchError(f"not within {LONGEST_S:g} s; look at the slurmctld's log")
        time.sleep(0.1)


def _runs(results: Results) -> int:
    return results.runs or (3 if results.quick else MIN_SAMPLES)


if __name__ == "__main__":
    raise SystemExit(main("controller", {"cost": cost, "requeue": requeue}))
