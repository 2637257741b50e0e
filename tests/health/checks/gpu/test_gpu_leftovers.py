"""Whose process is on a GPU, and whether it may be there."""

from __future__ import annotations

from typing import Any

import pytest
from fake_gpus import gb200, gpu_node, h100, v100
from fake_system import FakeSystem, context

from health.checks.gpu.gpu_leftovers import CHECK, allocated
from health.node.system import Context
from robust_slurm.process_stat import PF_EXITING

SPOOL = "/var/spool/slurmd"
PID = 4711
MINE, OTHER = 7, 8  # jobs
MIB = 1 << 20


def at(where: str = "prolog", gpus: str | None = None, job: int = MINE) -> Context:
    given = {} if gpus is None else {"SLURM_JOB_GPUS": gpus}
    return context(where, job=job, SLURM_JOB_SLUID=OURS, **given)


def process(
    pid: int = PID,
    job: int = 0,
    uid: int = 1000,
    comm: str = "python",
    claims: int = 0,
    sluid: str = "",
) -> dict[str, Any]:
    """A process in /proc: in the cgroup of ``job``, or only saying that it is of ``claims``."""
    name = f"job_{job}" if job else sluid
    cgroup = f"/slurmstepd.scope/{name}/step_0/user/task_0" if name else "/user.slice"
    environ = f"A=1\0SLURM_JOB_ID={claims}\0B=2\0" if claims else "A=1\0"
    return {
        f"/proc/{pid}/status": f"Name:\t{comm}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n",
        f"/proc/{pid}/comm": f"{comm}\n",
        f"/proc/{pid}/cgroup": f"0::/system.slice{cgroup}\n",
        f"/proc/{pid}/environ": environ,
    }


def step(job: int, node: str = "n1") -> dict[str, Any]:
    return {f"{SPOOL}/{node}_{job}.4294967292": ""}


# Slurm 26.05 names the cgroup of job MINE so, and that of another job.
OURS, THEIRS = "s1X1M8HJD3FG00", "s1X1M8HJD3FG01"


def stepd(job: int, sluid: str) -> dict[str, Any]:
    return step(job) | {
        "/proc/90/comm": "slurmstepd\n",
        "/proc/90/status": "Name:\tslurmstepd\nUid:\t0\t0\t0\t0\n",
        "/proc/90/cmdline": f"slurmstepd: [{job}.0]\0",
        "/proc/90/cgroup": f"0::/system.slice/slurmstepd.scope/{sluid}/step_0/slurm\n",
    }


def node(files: dict[str, Any], where: Context, on: int = 0, count: int = 4) -> FakeSystem:
    """Process 4711 is on GPU ``on`` of ``count``."""
    devices = [h100(i) for i in range(count)]
    devices[on] |= {
        "processes": [{"pid": PID, "memory": 5000 * MIB, "kind": "compute"}],
        "memory": {"total": 80 << 30, "used": 5000 * MIB},
    }
    return gpu_node(devices, files=files, context=where)


@pytest.mark.parametrize(
    ("state", "flags", "threads", "goes", "expected"),
    [
        ("S", 0, {}, True, "FAIL"),
        ("R", PF_EXITING, {}, True, ""),
        ("R", PF_EXITING, {}, False, "FAIL"),
        ("Z", PF_EXITING, {4712: PF_EXITING}, True, ""),
        ("Z", PF_EXITING, {4712: PF_EXITING}, False, "FAIL"),
        ("Z", PF_EXITING, {4712: 0}, True, "FAIL"),  # its program goes on
    ],
)
def test_one_that_is_ending_has_time_to_give_the_gpu_back(
    state: str, flags: int, threads: dict[int, int], goes: bool, expected: str
) -> None:
    def stat(pid: int, state: str, flags: int) -> str:
        return f"{pid} (python) {state} 1 1 1 0 -1 {flags} {'0 ' * 10}{1 + len(threads)} 0 9 0\n"

    files = process() | process(PID + 9)  # two, which end together
    for pid in (PID, PID + 9):
        files[f"/proc/{pid}/stat"] = stat(pid, state, flags)
        for thread, of in threads.items():
            files[f"/proc/{pid}/task/{thread}/stat"] = stat(thread, "R", of)
    system = node(files, at("epilog", "0"))
    system.snapshot["devices"][0]["processes"].append({"pid": PID + 9, "kind": "compute"})
    slept = []

    def pause(seconds: float) -> None:
        slept.append(seconds)
        if goes and len(slept) == 3:
            for path in [path for path in system.files if path.startswith("/proc/47")]:
                system.files.pop(path)

    system.pause = pause  # type: ignore[attr-defined]
    assert [finding.status for finding in CHECK.run(system)] == ([expected] * 2 if expected else [])
    assert sum(slept) < CHECK.deadline_s


LEFT = ["FAIL gpu-process-left"]
FOREIGN = ["WARN gpu-process-foreign"]


@pytest.mark.parametrize(
    ("what", "files", "where", "on", "expected"),
    [
        ("nobody's, node alone", process(), at(), 0, LEFT),
        ("nobody's, sweep of an idle node", process(), at("sweep", job=0), 0, LEFT),
        ("nobody's, on this job's GPU", process() | step(OTHER), at(gpus="0,1"), 0, LEFT),
        ("nobody's, elsewhere on a shared node", process() | step(OTHER), at(gpus="0,1"), 2, []),
        ("nobody's, shared, GPUs not told", process() | step(OTHER), at(), 0, []),
        ("nobody's, shared, sweep", process() | step(OTHER), at("sweep", job=0), 0, []),
        ("of a job that ended", process(job=6), at(), 0, LEFT),
        ("of a job that ended, shared", process(job=6) | step(OTHER), at(), 0, LEFT),
        (
            "of a job that ended, shared sweep",
            process(job=6) | step(OTHER),
            at("sweep", job=0),
            0,
            LEFT,
        ),
        ("of a running job", process(job=OTHER) | step(OTHER), at(gpus="1"), 0, []),
        ("of a running job, sweep", process(job=OTHER) | step(OTHER), at("sweep", job=0), 0, []),
        ("of a running job, on ours", process(job=OTHER) | step(OTHER), at(gpus="0"), 0, FOREIGN),
        ("of a running job, GPUs not told", process(job=OTHER) | step(OTHER), at(), 0, []),
        ("ours, before the job", process(job=MINE), at(gpus="0"), 0, []),
        ("ours, after the job", process(job=MINE), at("epilog", "0"), 0, LEFT),
        (
            "ours, after the job, its step hangs",
            process(job=MINE) | step(MINE),
            at("epilog", "0"),
            0,
            LEFT,
        ),
        (
            "ours, after the job, shared",
            process(job=MINE) | step(OTHER),
            at("epilog", "1"),
            0,
            LEFT,
        ),
        ("says it is of a running job", process(claims=OTHER) | step(OTHER), at(gpus="1"), 0, []),
        ("says it is of one that ended", process(claims=6) | step(OTHER), at(gpus="1"), 0, []),
        ("says so on our GPU", process(claims=6) | step(OTHER), at(gpus="0"), 0, LEFT),
        ("says it is ours, after", process(claims=MINE) | step(OTHER), at("epilog", "1"), 0, LEFT),
        ("ours by SLUID, before", process(sluid=OURS), at(gpus="0"), 0, []),
        ("ours by SLUID, after", process(sluid=OURS), at("epilog", "0"), 0, LEFT),
        (
            "of a running job by SLUID",
            process(sluid=THEIRS) | stepd(OTHER, THEIRS),
            at(gpus="1"),
            0,
            [],
        ),
        (
            "of a running job by SLUID, on ours",
            process(sluid=THEIRS, claims=MINE) | stepd(OTHER, THEIRS),
            at(gpus="0"),
            0,
            FOREIGN,
        ),
        (
            "by SLUID of a job that ended",
            process(sluid=THEIRS, claims=OTHER) | step(OTHER),
            at(gpus="1"),
            0,
            LEFT,
        ),
        ("another node's step", process() | step(OTHER, "n11"), at(), 0, LEFT),
        ("a service of root's", process(uid=0, comm="nv-hostengine"), at(), 0, []),
        ("a user who calls himself so", process(uid=1000, comm="nv-hostengine"), at(), 0, LEFT),
        ("root, unknown", process(uid=0, comm="gpu_burn"), at(), 0, LEFT),
        ("ended meanwhile", {}, at(), 0, []),
    ],
)
def test_processes(
    what: str, files: dict[str, Any], where: Context, on: int, expected: list[str]
) -> None:
    found = CHECK.run(node(files, where, on))
    assert [f"{f.status} {f.check}" for f in found] == expected, what
    assert all(f.device == f"gpu{on}" and f.cls == "user" for f in found)
    assert all(str(PID) in f.evidence for f in found)


@pytest.mark.parametrize(
    ("uid", "claims", "where", "expected"),
    [
        (1000, MINE, at(gpus="0"), []),  # a first step that is quicker than its prolog
        (2000, MINE, at(gpus="0"), LEFT),  # a stranger's
        (1001, OTHER, at(gpus="0"), FOREIGN),
        (2000, OTHER, at(gpus="0"), LEFT),  # of a running job, he says
        (2000, OTHER, at("sweep", job=0), []),  # on a GPU that need not be free
    ],
)
def test_what_a_process_says_counts_for_its_jobs_user_only(
    uid: int, claims: int, where: Context, expected: list[str]
) -> None:
    rank = process(PID + 50, uid=1001) | {
        f"/proc/{PID + 50}/stat": f"{PID + 50} (python) S 77 1 1 0 -1 0 {'0 ' * 10}1 0 9 0\n"
    }
    files = process(uid=uid, claims=claims) | step(OTHER) | rank | slurmstepd(77, OTHER)
    where = where._replace(uid=1000 if where.job else -1)
    assert [f"{f.status} {f.check}" for f in CHECK.run(node(files, where))] == expected


def test_who_has_a_slurmstepd_above_is_its_jobs() -> None:
    below = {f"/proc/{PID}/stat": f"{PID} (python) S 77 1 1 0 -1 0 {'0 ' * 10}1 0 9 0\n"}
    files = process(uid=1001) | below | step(OTHER) | slurmstepd(77, OTHER)
    assert [f.check for f in CHECK.run(node(files, at(gpus="0")))] == ["gpu-process-foreign"]


def slurmstepd(pid: int, job: int) -> dict[str, Any]:
    return {
        f"/proc/{pid}/comm": "slurmstepd\n",
        f"/proc/{pid}/stat": f"{pid} (slurmstepd) S 1 1 1 0 -1 0 {'0 ' * 10}1 0 9 0\n",
        f"/proc/{pid}/status": "Name:\tslurmstepd\nUid:\t0\t0\t0\t0\n",
        f"/proc/{pid}/cmdline": f"slurmstepd: [{job}.0]\0",
        f"/proc/{pid}/cgroup": "0::/\n",
    }


def test_where_steps_cannot_be_listed_only_what_is_surely_free_is_judged() -> None:
    denied = {SPOOL: PermissionError(13, "denied")}
    for files, gpus, expected in (
        (process(), None, []),
        (process(), "0", LEFT),
        (process(job=6), None, []),
        (process(job=6), "0", LEFT),
    ):
        system = node(files, at(gpus=gpus))
        system.fail = denied
        assert [f"{f.status} {f.check}" for f in CHECK.run(system)] == expected


def test_a_name_cannot_break_the_evidence() -> None:
    files = process(comm='a"\x1b[2J\nb' + "x" * 40)
    (found,) = CHECK.run(node(files, at()))
    assert found.evidence.isprintable() and found.evidence.count('"') == 2


def test_a_clean_node_reads_nothing() -> None:
    system = gpu_node([h100(i) for i in range(8)])
    assert CHECK.run(system) == []
    assert set(system.asked) == {"nvml"}


@pytest.mark.parametrize(
    ("model", "used", "where", "options", "expected"),
    [
        (h100, 1024, at(), {}, []),
        (h100, 1025, at(), {}, ["FAIL gpu-memory-left"]),
        (h100, 1025, at("sweep", job=0), {}, ["FAIL gpu-memory-left"]),
        (h100, 1025, at(), {"memory": 2048}, []),
        (h100, 20, at(), {"memory": 15}, ["FAIL gpu-memory-left"]),
        (v100, 1025, at(), {}, ["FAIL gpu-memory-left"]),
        (gb200, 9000, at(), {}, ["WARN gpu-memory-left"]),
    ],
)
def test_memory_without_a_process(
    model: Any, used: int, where: Context, options: dict[str, Any], expected: list[str]
) -> None:
    device = model(0) | {"memory": {"total": 80 << 30, "used": used * MIB}}
    system = gpu_node([device], context=where, options={"gpu_leftovers": options})
    found = CHECK.run(system)
    assert [f"{f.status} {f.check}" for f in found] == expected
    assert all(f.action == "reset-gpu" and f"{used} MiB" in f.evidence for f in found)


def test_memory_of_another_jobs_gpu_is_its_own_business() -> None:
    device = h100(0) | {"memory": {"total": 80 << 30, "used": 9000 * MIB}}
    system = gpu_node([device], files=step(OTHER), context=at("sweep", job=0))
    assert CHECK.run(system) == []


# --- SLURM_JOB_GPUS: numbers of Slurm's, to the minor number, to the PCI address


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("0,2", {0, 2}),
        ("3", {3}),
        ("", set()),
        ("GPU-1234", set()),
        ("0-3", set()),
        ("0,", set()),
        ("0,4,9", {0}),
    ],
)
def test_allocated(text: str, gpus: set[int]) -> None:
    assert allocated(gpu_node([h100(i) for i in range(4)], context=at(gpus=text))) == gpus


def test_allocated_goes_by_the_order_of_gres_conf_and_the_drivers_minor_numbers() -> None:
    devices = [h100(i) for i in range(4)]
    files: dict[str, Any] = {
        "/etc/slurm/gres.conf": "Name=gpu File=/dev/nvidia3\nName=gpu File=/dev/nvidia[0-2]\n"
    }
    for device, minor in zip(devices, (1, 0, 3, 2), strict=True):
        path = f"/proc/driver/nvidia/gpus/{device['pci']}/information"
        files[path] = f"Model: X\nDevice Minor: \t {minor}\n"
    system = gpu_node(devices, files=files, context=at(gpus="0,1"))
    assert allocated(system) == {2, 1}  # minors 3 and 0
