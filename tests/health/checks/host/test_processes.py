"""The processes family and the table of processes under it."""

from __future__ import annotations

from typing import Any

import pytest
from fake_host import SPOOL, healthy, ids, process
from fake_system import FakeSystem, context
from hypothesis import given
from hypothesis import strategies as st

from health.checks.host import processes
from health.node import jobs, proctable
from health.node.stuck import DIRECTORY
from robust_slurm import process_stat

run = processes.CHECK.run
FAIL, WARN = "FAIL", "WARN"
JOB55 = {f"{SPOOL}/n1_55.4294967292": ""}
SWEEP = context("sweep", job=0)


class Time:
    """time.sleep that takes no time, and does what happens meanwhile."""

    def __init__(self) -> None:
        self.slept = 0.0
        self.meanwhile = lambda: None

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.meanwhile()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    fake = Time()
    monkeypatch.setattr(proctable, "time", fake)
    return fake


# --- what is read -------------------------------------------------------------------------------


@given(st.text(max_size=20), st.integers(2, 99999))
def test_a_process_may_have_any_name(name: str, pid: int) -> None:
    one = process(pid, name, "D")
    found = process_stat.parse(one["files"][f"/proc/{pid}/stat"])
    assert (found.pid, found.name, found.state, found.parent) == (pid, name, "D", 1)
    assert found.start == 1000 + pid


@given(st.text(max_size=200))
def test_other_text_is_no_process(text: str) -> None:
    with pytest.raises(ValueError):
        process_stat.parse(text + "x")


SLUID = "s1X1M8HJD3FG00"


@pytest.mark.parametrize(
    ("cgroup", "job", "login"),
    [
        ("0::/system.slice/slurmstepd.scope/job_55/step_0/user/task_0\n", 55, False),
        ("4:memory:/slurm/uid_1000/job_55/step_batch\n1:name=systemd:/system.slice\n", 55, False),
        ("4:memory:/slurm_n1/uid_1000/job_7\n", 7, False),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", None, True),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/x.service\n", None, True),
        ("0::/\n", None, False),
        ("0::/system.slice/job_x/y\n", None, False),
        ("0::/my_job_12/x\n", None, False),
        ("0::/system.slice/slurmstepd.scope/job_12\n", 12, False),
        ("", None, False),
        ("0::/system.slice/n1_slurmstepd.scope/job_1/step_0/user/task_0\n", 1, False),
        ("0::/a.slice/a-b.slice/slurmstepd.scope/job_1/step_0\n", 1, False),  # CgroupSlice
        # Users make what cgroups they like below their own, and so does a container's root.
        ("0::/user.slice/user-1000.slice/user@1000.service/job_9/x\n", None, True),
        ("0::/foo/job_77/x\n", None, False),
        ("0::/slurm/uid_1000/job_77/x\n", None, False),
        ("0::/system.slice/x.service/slurmstepd.scope/job_77/step_0\n", None, False),
        ("0::/machine.slice/libpod-1f.scope/slurmstepd.scope/job_77/step_0\n", None, False),
        ("0::/machine.slice/slurmstepd.scope/job_77/step_0\n", None, False),
        ("0::/docker/1f/slurmstepd.scope/job_77/step_0\n", None, False),
        ("0::/kubepods.slice/cri-1f.scope/slurmstepd.scope/job_77/step_0\n", None, False),
        ("4:memory:/docker/slurm/uid_1000/job_77\n", None, False),
        ("1:name=systemd:/x/slurmstepd.scope/job_77/step_0\n0::/\n", None, False),
        # Only the first is Slurm's, what is below it may be the task's.
        ("0::/system.slice/slurmstepd.scope/job_55/step_0/user/task_0/job_77\n", 55, False),
        ("4:memory:/slurm/uid_1000/job_55/step_0/task_0/job_77/x\n", 55, False),
        (f"0::/system.slice/slurmstepd.scope/{SLUID}/step_0/user/task_0/job_77\n", None, False),
    ],
)
def test_cgroups(cgroup: str, job: int | None, login: bool) -> None:
    assert proctable.job(cgroup) == job
    assert proctable.is_login(cgroup) == login


MANAGER = "/user.slice/user-1000.slice/user@1000.service"
SCOPES = "0::/system.slice/slurmstepd.scope/{}\n"


@pytest.mark.parametrize(
    ("cgroup", "sluid", "daemons"),
    [
        # As 26.05.5 named them.
        (f"0::/system.slice/slurmstepd.scope/{SLUID}/step_0/user/task_0\n", SLUID, ""),
        (f"0::/system.slice/n1_slurmstepd.scope/{SLUID}/step_0/user/task_0\n", SLUID, ""),
        (f"0::/system.slice/n1_slurmstepd.scope/{SLUID}/step_0/slurm\n", SLUID, SLUID),
        (f"0::/system.slice/n1_slurmstepd.scope/{SLUID}/step_batch/user/task_0\n", SLUID, ""),
        (f"0::/system.slice/n1_slurmstepd.scope/{SLUID}/step_batch/slurm\n", SLUID, SLUID),
        (f"0::/system.slice/n1_slurmstepd.scope/{SLUID}/step_extern/slurm\n", SLUID, SLUID),
        (f"0::/system.slice/n1_slurmstepd.scope/{SLUID}/step_extern/user\n", SLUID, ""),
        ("0::/system.slice/n1_slurmstepd.scope/slurmd\n", "", ""),
        ("0::/system.slice/n1_slurmstepd.scope/system\n", "", ""),
        (f"0::/pod.slice/slurmstepd.scope/{SLUID}\n", SLUID, ""),
        ("0::/system.slice/slurmstepd.scope/sEKNKTV3WPV500/step_0\n", "sEKNKTV3WPV500", ""),
        (f"1:name=systemd:/x\n0::/system.slice/slurmstepd.scope/{SLUID}/y\n", SLUID, ""),
        # A task's own directories are no daemon's.
        (f"0::/system.slice/slurmstepd.scope/{SLUID}/step_0/user/step_1/slurm\n", SLUID, ""),
        # With CgroupJobIdPaths, and elsewhere than below Slurm's.
        ("0::/system.slice/slurmstepd.scope/job_1/step_0/user/task_0\n", "", ""),
        (f"0::/system.slice/{SLUID}/step_0/user/task_0\n", "", ""),
        (f"0::{MANAGER}/slurmstepd.scope/{SLUID}/step_0/slurm\n", "", ""),
        (f"0::/pod.slice/x.scope/system.slice/slurmstepd.scope/{SLUID}\n", "", ""),
        (f"0::/machine.slice/slurmstepd.scope/{SLUID}/step_0/slurm\n", "", ""),
        (f"0::/system.slice/slurmstepd.scope/job_1/slurmstepd.scope/{SLUID}/step_0\n", "", ""),
        ("0::/system.slice/slurmstepd.scope/s1X1M8HJD3FG0U/step_0\n", "", ""),
        (f"0::/system.slice/slurmstepd.scope/{SLUID}0/step_0\n", "", ""),
        ("", "", ""),
    ],
)
def test_cgroups_named_by_sluid(cgroup: str, sluid: str, daemons: str) -> None:
    assert (proctable.sluid(cgroup), proctable.daemons_sluid(cgroup)) == (sluid, daemons)
    assert proctable.is_login(cgroup) is ("/user.slice/" in cgroup)


def stepd(pid: int, title: str, at: str, uid: int = 0, name: str = "slurmstepd") -> dict[str, str]:
    return {
        f"/proc/{pid}/comm": f"{name}\n",
        f"/proc/{pid}/status": f"Name:\t{name}\nUid:\t{uid}\t0\t0\t0\n",
        f"/proc/{pid}/cmdline": f"{title}\0",
        f"/proc/{pid}/cgroup": SCOPES.format(at),
    }


OTHERS = "s2222222222222"
TASK = "{}/step_0/user/task_0"


@pytest.mark.parametrize(
    ("files", "job"),
    [
        (stepd(90, "slurmstepd: [55.extern]", f"{OTHERS}/step_extern/slurm"), 55),
        (stepd(90, "slurmstepd: [55.0 stepmgr]", f"{OTHERS}/step_0/slurm"), 55),
        ({}, jobs.UNKNOWN),
        (stepd(90, "slurmstepd: [55.0]", f"{SLUID}/step_0/slurm"), jobs.UNKNOWN),
        # None of these is a daemon of Slurm's.
        (stepd(90, "slurmstepd: [55.0]", f"{OTHERS}/step_0/slurm", uid=1000), jobs.UNKNOWN),
        (stepd(90, "slurmstepd: [55.0]", f"{OTHERS}/step_0/user/task_0"), jobs.UNKNOWN),
        (stepd(90, "slurmstepd: [55.0]", f"{OTHERS}/step_0/slurm", name="sudo"), jobs.UNKNOWN),
        (stepd(90, "/usr/sbin/slurmstepd infinity", f"{OTHERS}/step_0/slurm"), jobs.UNKNOWN),
    ],
)
def test_the_number_of_a_sluid_is_slurms_word(files: dict[str, str], job: int) -> None:
    mine = {"SLURM_JOB_SLUID": SLUID}
    owners = proctable.Jobs(FakeSystem(files, context=context("epilog", job=7, **mine)))
    assert owners.of(SCOPES.format(TASK.format(SLUID))) == 7
    assert owners.of(SCOPES.format(TASK.format(OTHERS))) == job
    assert owners.of(SCOPES.format(TASK.format("job_12"))) == 12
    assert owners.of("0::/system.slice/slurmd.service\n") is None


def test_other_text_in_place_of_a_sluid() -> None:
    for text in ("", "7", "x" + SLUID, SLUID + "/..", "s1X1M8HJD3FGii"):
        assert proctable.own_sluid({"SLURM_JOB_SLUID": text}, 7) == {}
    assert proctable.own_sluid({"SLURM_JOB_SLUID": SLUID}, 0) == {}


@pytest.mark.parametrize(
    ("names", "running"),
    [
        ([], set()),
        (["n1_55.4294967292", "n1_55.0", "n1_60.4294967291"], {55, 60}),
        (["n1_7.0"], set()),  # the context's own job
        (["n1_88.3.1"], {88}),  # a component of a heterogeneous step
        (["n10_55.0", "xn1_55.0", "n1_55", "n1_55.x", "cred_state", "job00055"], set()),
    ],
)
def test_running_jobs(names: list[str], running: set[int]) -> None:
    conf = {"/etc/slurm/slurm.conf": "NodeName=n1\nSlurmdSpoolDir=/spool/%n\n"}
    files = {f"/spool/n1/{name}": "" for name in names}
    assert jobs.running(FakeSystem(conf | files, dirs=["/spool/n1"])) == running


def test_running_jobs_that_cannot_be_told() -> None:
    assert jobs.running(FakeSystem()) is None


# --- the family ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tasks", "found"),
    [
        (3000, []),
        (28_000, [(WARN, "tasks-many", "")]),
        (32_000, [(FAIL, "tasks-exhausted", "")]),
    ],
)
def test_process_ids(tasks: int, found: list[Any]) -> None:
    more = {
        "/proc/sys/kernel/pid_max": "32768\n",
        "/proc/loadavg": f"0.1 0.1 0.1 1/{tasks} 9\n",
    }
    assert ids(run(healthy(more=more))) == found


def test_the_prolog_does_not_walk_unless_there_is_load() -> None:
    left = process(4000, "python", uid=1003, cgroup="/")
    system = healthy((left,))
    assert run(system) == []
    assert not system.asked["names /proc"]
    system = healthy((left,), more={"/proc/loadavg": "1.2 1.1 0.9 2/3000 9\n"})
    assert ids(run(system)) == [(WARN, "processes-left", "")]


SLURM = "/system.slice/slurmstepd.scope/job_{}/step_0/user/task_0"
SCOPE = "/system.slice/slurmstepd.scope/{}/step_0/user/task_0"


@pytest.mark.parametrize(
    ("uid", "cgroup", "busy", "found"),
    [
        (1003, "/", False, [(WARN, "processes-left", "")]),
        (1003, SLURM.format(55), False, [(WARN, "processes-left", "")]),
        (1003, SLURM.format(55), True, []),
        (1003, SLURM.format(44), True, [(WARN, "processes-left", "")]),
        (1003, SCOPE.format(SLUID), True, [(WARN, "processes-left", "")]),
        (1003, SCOPE.format(OTHERS), True, []),  # of the running job's
        (1003, "/", True, []),  # it may be the running job's
        (1003, "/user.slice/user-1003.slice/session-1.scope", False, []),  # somebody logged in
        (999, "/", False, []),
        (61200, "/", False, []),  # a dynamic user of systemd
        (65534, "/", False, []),
        (1004, "/", False, []),  # in `ignore` by name
        (1005, "/", False, []),  # in `ignore` by number
    ],
)
def test_processes_left(uid: int, cgroup: str, busy: bool, found: list[Any]) -> None:
    more = {"/etc/passwd": "root:x:0:0::/:/bin/sh\nmonitor:x:1004:1004::/:/bin/sh\n"}
    system = healthy(
        (process(4000, "python", uid=uid, cgroup=cgroup),),
        more=more
        | (JOB55 | stepd(90, "slurmstepd: [55.0]", f"{OTHERS}/step_0/slurm") if busy else {}),
        options={"processes": {"ignore": ["monitor", "1005"]}},
        context=SWEEP,
    )
    assert ids(run(system)) == found


@pytest.mark.parametrize(
    ("where", "cgroup", "flags", "status"),
    [
        ("epilog", SLURM.format(7), 0x400000, [FAIL]),  # in the cgroup of the job that has ended
        ("epilog", SLURM.format(7), process_stat.PF_EXITING, []),  # on its way out
        ("epilog", SLURM.format(6), 0x400000, [WARN]),
        ("epilog", SCOPE.format(SLUID), 0x400000, [FAIL]),
        ("epilog", SCOPE.format(OTHERS), 0x400000, [WARN]),
        ("sweep", SLURM.format(7), 0x400000, [WARN]),
        ("prolog", SLURM.format(7), 0x400000, []),  # the job's own first step
        ("prolog", SCOPE.format(SLUID), 0x400000, []),
    ],
)
def test_what_the_job_left(where: str, cgroup: str, flags: int, status: list[str]) -> None:
    left = process(4000, "python", uid=1000, cgroup=cgroup, flags=flags)
    load = {"/proc/loadavg": "1.2 1.1 0.9 2/3000 9\n"}
    found = run(healthy((left,), more=load, context=context(where, SLURM_JOB_SLUID=SLUID)))
    assert [finding.status for finding in found] == status
    assert all(finding.check == "processes-left" for finding in found)


NVIDIA, NFS = "uvm_va_space_destroy", "rpc_wait_bit_killable"
NFS_STACK = "[<0>] folio_wait_bit_common+0x13d/0x350\n[<0>] nfs_wb_all+0x8d/0x120 [nfs]\n"
LOCK_STACK = (  # of a mkdir beside one that a user's FUSE daemon never answers
    "[<0>] rwsem_down_write_slowpath+0x1/0x2\n[<0>] down_write+0x5/0x9\n"
    "[<0>] filename_create+0x3/0x4\n[<0>] do_mkdirat+0x5/0x6\n"
)
OTHER_STACK = "[<0>] folio_wait_bit_common+0x13d/0x350\n[<0>] ext4_sync_file+0x1/0x9 [ext4]\n"


@pytest.mark.parametrize(
    ("one", "found", "action"),
    [
        ({"killed": True, "wchan": NVIDIA}, (FAIL, "process-stuck"), "reboot"),
        ({"flags": process_stat.PF_EXITING, "wchan": NVIDIA}, (FAIL, "process-stuck"), "reboot"),
        ({"killed": True, "wchan": NFS}, (FAIL, "process-stuck"), "none"),
        ({"killed": True, "wchan": "request_wait_answer"}, (FAIL, "process-stuck"), "none"),
        (
            {"killed": True, "wchan": "folio_wait_bit_common", "stack": NFS_STACK},
            (FAIL, "process-stuck"),
            "none",
        ),
        (
            {"killed": True, "wchan": "folio_wait_bit_common", "stack": OTHER_STACK},
            (FAIL, "process-stuck"),
            "none",  # its page may be locked by who waits for a user's FUSE daemon
        ),
        (
            {"killed": True, "wchan": "rwsem_down_write_slowpath", "stack": LOCK_STACK},
            (FAIL, "process-stuck"),
            "none",
        ),
        (
            {"killed": True, "wchan": "blk_mq_x", "stack": "[<0>] nvme_wait+0x1/0x2 [nvme]\n"},
            (FAIL, "process-stuck"),
            "reboot",
        ),
        *(
            (
                {"killed": True, "wchan": "0", "stack": f"[<0>] {line}\n"},
                (FAIL, "process-stuck"),
                do,
            )
            for line, do in (
                ("cxiWaitEventWait+0x1a0/0x2c0 [mmfslinux]", "none"),
                ("cxiWaitEventWait+0x1a0/0x2c0", "none"),
                ("wait_for_reply+0x1/0x2 [beegfs]", "none"),
                ("cxi_eq_wait+0x1/0x2 [cxi_ss1]", "reboot"),  # a network's driver
            )
        ),
        ({"killed": False, "wchan": NFS}, (WARN, "process-blocked"), "none"),
        ({"killed": False, "wchan": ""}, (WARN, "process-blocked"), "none"),
    ],
)
def test_a_process_in_state_d(one: dict[str, Any], found: tuple[str, str], action: str) -> None:
    stuck = process(4000, "python3", "D", uid=1003, **one)
    finding, *left = run(healthy((stuck,), context=SWEEP))
    assert {other.check for other in left} <= {"processes-left"}
    assert (finding.status, finding.check, finding.action) == (*found, action)
    assert "4000 (python3)" in finding.evidence
    if finding.status == FAIL:
        assert finding.cls == ("node" if action == "reboot" else "user")
        assert finding.uid == (-1 if action == "reboot" else 1003)


@pytest.mark.parametrize("channel", ["request_wait_answer", "fuse_dev_do_read", "handle_userfault"])
def test_a_driver_is_not_blamed_while_a_user_may_hold_its_lock(channel: str) -> None:
    """A buffer of the driver may be memory of a file that a user's own daemon serves."""
    stuck = process(4000, "python3", "D", uid=1003, killed=True, wchan=NVIDIA)
    holder = process(4001, "python3", "S", uid=1003)
    more = {"/proc/4001/task/4002/wchan": channel}
    finding, _ = run(healthy((stuck, holder), more=more, context=SWEEP))
    assert (finding.check, finding.cls, finding.action) == ("process-stuck", "user", "none")


@pytest.mark.parametrize(("state", "cls"), [("D", "user"), ("S", "node")])
def test_a_driver_is_not_blamed_beside_a_wait_for_a_file_server(state: str, cls: str) -> None:
    """A thread of the file system's own that has nothing to do (S) holds nothing."""
    stuck = process(4000, "python3", "D", uid=1003, killed=True, wchan=NVIDIA)
    holder = process(4001, "python3", "S", uid=1003)
    at = "/proc/4001/task/4002"
    more = {f"{at}/wchan": NFS, f"{at}/stat": f"4002 (x) y) {state} 1 1"}
    finding, _ = run(healthy((stuck, holder), more=more, context=SWEEP))
    assert (finding.check, finding.cls) == ("process-stuck", cls)


@pytest.mark.parametrize(("uid", "found"), [(0, []), (1003, [(FAIL, "process-stuck", "")])])
def test_the_gates_own_children_are_never_judged(uid: int, found: list[Any]) -> None:
    lost = process(4000, "robust-gate", "D", uid=uid, killed=True, wchan="request_wait_answer")
    judged = [one for one in ids(run(healthy((lost,), context=SWEEP))) if one[0] == FAIL]
    assert judged == found


@pytest.mark.parametrize(
    ("uid", "whose"),
    [(1003, 1003), (100_007, 1003), (165_536, 1004), (231_072, -1), (296_608, 296_608)],
)
def test_a_uid_lent_for_a_namespace_is_its_users(uid: int, whose: int) -> None:
    files = {
        "/etc/subuid": "alice:100000:65536\n1004:165536:65536\ngone:231072:65536\nx:y\n\n",
        "/etc/passwd": "root:x:0:0::/:/bin/sh\nalice:x:1003:1003::/:/bin/sh\n",
    }
    assert proctable.account(FakeSystem(files), uid) == whose


def test_roots_own_process_that_waits_for_a_server_keeps_no_job_out() -> None:
    lost = process(4000, "scontrol", "D", killed=True, wchan=NFS)
    assert ids(run(healthy((lost,), context=SWEEP))) == [(WARN, "process-blocked", "")]


def test_a_killed_process_has_time_to_die(clock: Time) -> None:
    stuck = process(4000, "python3", "D", killed=True, wchan=NVIDIA)
    system = healthy((stuck,), context=SWEEP)

    def goes() -> None:
        if clock.slept > 4:
            system.files.pop("/proc/4000/stat", None)

    clock.meanwhile = goes
    assert run(system) == []


@pytest.mark.parametrize(("where", "most"), [("prolog", 3.0), ("epilog", 6.0), ("sweep", 6.0)])
def test_the_looks_end_before_the_deadline(clock: Time, where: str, most: float) -> None:
    stuck = process(4000, "python3", "D", killed=True, wchan=NVIDIA)
    load = {"/proc/loadavg": "1.2 1.1 0.9 2/3000 9\n"}
    assert ids(run(healthy((stuck,), more=load, context=context(where)))) != []
    assert clock.slept == pytest.approx(most)
    assert most < processes.CHECK.deadline_s


def test_a_pid_used_again_is_another_process(clock: Time) -> None:
    system = healthy((process(4000, "a", "D", killed=True),), context=SWEEP)

    def again() -> None:
        stat = str(system.files["/proc/4000/stat"])
        system.files["/proc/4000/stat"] = stat.replace(" 5000 ", " 777777 ")

    clock.meanwhile = again
    assert run(system) == []


@pytest.mark.parametrize(
    ("cgroup", "more", "found"),
    [
        (SLURM.format(55), JOB55, []),  # a running job waits for its I/O
        ("/system.slice/x.service", JOB55, []),
        (SLURM.format(44), JOB55, [(FAIL, "process-stuck", "")]),
    ],
)
def test_state_d_beside_a_running_job(cgroup: str, more: Any, found: list[Any]) -> None:
    stuck = process(4000, "python3", "D", killed=True, cgroup=cgroup, wchan=NVIDIA)
    assert ids(run(healthy((stuck,), more=more, context=SWEEP))) == found


def test_without_sight_of_the_jobs_state_d_is_a_warning() -> None:
    stuck = process(4000, "python3", "D", killed=True, wchan=NVIDIA)
    system = healthy((stuck,), fail={SPOOL: PermissionError(13, "denied")}, context=SWEEP)
    assert ids(run(system)) == [(WARN, "process-blocked", "")]


@pytest.mark.parametrize(
    ("started", "parent", "found"),
    [
        (5000, 1, []),  # a check of an earlier run lost it, and tells what hangs
        (4999, 1, [(FAIL, "process-stuck", "")]),  # the pid is another process's now
        (0, 4001, []),  # a probe of this run
        (0, 4002, []),
    ],
)
def test_what_the_gate_itself_lost_is_for_other_checks(
    started: int, parent: int, found: list[Any]
) -> None:
    known = {f"{DIRECTORY}/boot.mount": f"4000\n{started}\nno answer\n"} if started else {}
    lost = process(4000, "prolog", "D", parent=parent, killed=True, wchan=NVIDIA)
    worker = process(4001, "prolog", "R", parent=4002)
    system = healthy((lost, worker), more=known, context=SWEEP)
    system.links["/proc/self"] = "4001"
    assert ids(run(system)) == found


def test_the_kernels_own_threads_may_sleep() -> None:
    thread = process(300, "jbd2/sda1-8", "D", parent=2, flags=process_stat.PF_KTHREAD)
    assert run(healthy((thread,), context=SWEEP)) == []


def test_a_name_cannot_forge_evidence() -> None:
    stuck = process(4000, "x\n: gpu0 \x1b[31m", "D", killed=True, wchan=NVIDIA)
    [finding] = run(healthy((stuck,), context=SWEEP))
    assert "4000 (x???gpu0???31m)" in finding.evidence


@pytest.mark.parametrize(("count", "found"), [(50, []), (51, [(WARN, "zombies", "")])])
def test_zombies_of_init(count: int, found: list[Any]) -> None:
    dead = tuple(process(5000 + n, "sh", "Z") for n in range(count))
    other = tuple(process(9000 + n, "sh", "Z", parent=900) for n in range(60))
    assert ids(run(healthy(dead + other, context=SWEEP))) == found


@pytest.mark.parametrize(
    ("load", "more", "found"),
    [
        ("60.0 58.0 50.0 65/3000 9", {}, [(WARN, "idle-load", "")]),
        ("60.0 58.0 50.0 65/3000 9", JOB55, []),
        ("60.0 58.0 50.0 2/3000 9", {}, []),  # what the last job left in the average
        ("2.0 2.0 2.0 65/3000 9", {}, []),  # a moment
    ],
)
def test_load(load: str, more: dict[str, str], found: list[Any]) -> None:
    root = process(4000, "stress", "R")
    assert ids(run(healthy((root,), more={"/proc/loadavg": load} | more, context=SWEEP))) == found


def test_only_so_many_processes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proctable, "MOST", 10)
    many = tuple(process(5000 + n, "bomb") for n in range(30))
    system = healthy(many, context=SWEEP)
    run(system)
    read = [asked for asked in system.asked if asked.startswith("read") and asked.endswith("/stat")]
    assert len([asked for asked in read if asked != "read /proc/stat"]) == 10
