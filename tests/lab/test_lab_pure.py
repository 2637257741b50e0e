"""The parts of the lab that are functions of data."""

import signal
import subprocess

import lab_nodes
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab import inside
from lab import spec as texts
from lab.errors import LabError
from lab.keeper import network, outages
from lab.keeper.mounts import Cover, plan_covers
from lab.keeper.ranks import Process, parse_environ, pick_rank
from lab.slurm.records import parse_nodes, parse_record, parse_state, started, usable, wants_resume
from lab.spec import LabSpec
from robust_slurm.hostlist import expand

SPEC = LabSpec(name="x", nodes=5, standby=1, gpus=4)


# -- spec -------------------------------------------------------------------------------------


def test_slurm_conf_has_the_nodes_and_partitions() -> None:
    text = texts.slurm_conf(SPEC)
    assert "PartitionName=train Nodes=n1,n2,n3,n4,n5 Default=YES" in text
    assert "PartitionName=standby Nodes=s1 Default=NO" in text
    assert text.count("Gres=gpu:h100:4") == 6
    assert "SlurmdTimeout=300\n" in text
    assert "PrologFlags=Alloc,Contain\n" in text


def test_slurm_conf_overrides_replace_add_and_drop() -> None:
    conf = {"slurmdtimeout": "30", "Prolog": "/p", "KillWait": "", "AuthInfo": "cred_expire=5"}
    lines = texts.slurm_conf(LabSpec(name="x", slurm_conf=conf)).splitlines()
    assert "SlurmdTimeout=30" in lines
    assert "Prolog=/p" in lines
    assert "AuthInfo=socket=/var/lib/robust-lab/x/munge/munge.socket,cred_expire=5" in lines
    assert not [line for line in lines if line.startswith(("KillWait", "SlurmdTimeout=300"))]


def test_accounting_has_a_slurmdbd() -> None:
    text = texts.slurm_conf(SPEC)
    assert "AccountingStorageType=accounting_storage/none\n" in text and "Enforce" not in text
    text = texts.slurm_conf(LabSpec(name="x", accounting=True))
    assert "AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=head\n" in text
    assert "AccountingStorageEnforce=associations,limits,qos\n" in text


def test_no_gpus_no_gres() -> None:
    plain = LabSpec(name="x")
    assert "res" not in texts.gres_conf(plain)
    assert "Gres" not in texts.slurm_conf(plain)


def test_addresses_differ_and_are_valid() -> None:
    big = LabSpec(name="x", nodes=5000, standby=5000)
    found = [texts.address(name) for name in big.all_names]
    assert len(set(found)) == len(found)
    assert all(0 <= int(part) <= 255 for address in found for part in address.split("."))
    assert texts.address("n1") == "10.77.0.1"
    assert texts.mac("n1") == "02:77:0a:4d:00:01"


def test_a_large_lab_names_its_nodes_by_ranges() -> None:
    big = LabSpec(name="x", nodes=1200, standby=1)
    lines = texts.slurm_conf(big).splitlines()
    nodes = [line.split()[:2] for line in lines if line.startswith("NodeName=")]
    assert nodes[0] == ["NodeName=n[1-250]", "NodeAddr=10.77.0.[1-250]"]
    assert nodes[4] == ["NodeName=n[1001-1200]", "NodeAddr=10.77.4.[1-200]"]
    assert nodes[5] == ["NodeName=s1", "NodeAddr=10.77.128.[1-1]"]
    assert any(line.startswith("PartitionName=train Nodes=n[1-1200] ") for line in lines)
    found = {}
    for names, addresses in nodes:
        keys, values = expand(names.partition("=")[2]), expand(addresses.partition("=")[2])
        found |= dict(zip(keys, values, strict=True))
    assert found == {name: texts.address(name) for name in big.compute_names}


def test_a_port_is_on_the_switch_or_has_a_route() -> None:
    assert network.port_lines(False, "p1b1", "n1", "10.77.0.1", 9) == [
        "link add p1b1 type veth peer name eth0 address 02:77:0a:4d:00:01 netns 9",
        "link set p1b1 master switch up",
    ]
    assert network.port_lines(True, "p1b1", "n1", "10.77.0.1", 9)[1:] == [
        "addr add 10.77.255.254 peer 10.77.0.1 dev p1b1",
        "link set p1b1 up",
    ]
    assert not LabSpec(name="x", nodes=500, standby=0).routed
    assert LabSpec(name="x", nodes=500, standby=1).routed


@pytest.mark.parametrize("name", ["", "../x", "A", "-a", "a b", "a" * 32, "x\n"])
def test_bad_lab_names(name: str) -> None:
    with pytest.raises(LabError, match="lab name"):
        texts.check_name(name)


@pytest.mark.parametrize(
    ("change", "word"),
    [({"nodes": 0}, "--nodes"), ({"standby": -1}, "--standby"), ({"gpus": 65}, "--gpus"),
     ({"cpus": 0}, "--cpus")],
)  # fmt: skip
def test_bad_sizes(change: dict[str, int], word: str) -> None:
    with pytest.raises(LabError, match=word):
        texts.check_spec(LabSpec(name="x", **change))  # type: ignore[arg-type]


def test_passwd_gets_the_user_once() -> None:
    host = "root:x:0:0::/root:/bin/sh\ntrainer:x:5:5::/:/bin/sh\n"
    text = texts.passwd_file(host, SPEC.shared)
    assert text.count("trainer:") == 1
    assert f"trainer:x:20001:20001:lab user:{SPEC.shared}:/bin/bash\n" in text


def test_fstab_gets_the_scratch() -> None:
    text = texts.fstab_file("# comment\n/dev/sda / ext4 rw 0 1", SPEC)
    assert text.splitlines()[:2] == ["# comment", "/dev/sda / ext4 rw 0 1"]
    assert text.endswith(f"\nlab {SPEC.scratch_dir} fuse.labfs rw,_netdev 0 0\n")


# -- mounts -----------------------------------------------------------------------------------

OWN = [Cover("/tmp", 0o1777, ()), Cover("/dev/shm", 0o1777, ()), Cover("/run", 0o755, ())]


@pytest.mark.parametrize(
    ("visible", "closed", "expected"),
    [
        (["/work/clone", "/usr"], [], OWN),
        (["/root/a/b"], ["/root"], [*OWN, Cover("/root", 0o755, ("/root/a/b",))]),
        (["/root/a/b"], ["/root", "/root/a"], [*OWN, Cover("/root", 0o755, ("/root/a/b",))]),
        (["/h/u/c", "/h/u/v"], ["/h/u"], [*OWN, Cover("/h/u", 0o755, ("/h/u/c", "/h/u/v"))]),
        (["/h/u/c", "/h/u/c/v"], ["/h/u"], [*OWN, Cover("/h/u", 0o755, ("/h/u/c",))]),
        (["/root"], ["/root"], [*OWN, Cover("/root", 0o755, ("/root/one",))]),
        (["/tmp/c"], [], [Cover("/tmp", 0o1777, ("/tmp/c",)), *OWN[1:]]),
        (["/tmp/c"], ["/tmp/c"], [Cover("/tmp", 0o1777, ("/tmp/c/one",)), *OWN[1:]]),
        (["/"], ["/"], OWN),
    ],
)
def test_plan_covers(visible: list[str], closed: list[str], expected: list[Cover]) -> None:
    assert plan_covers(visible, closed.__contains__, lambda path: [f"{path}/one"]) == expected


# -- ranks ------------------------------------------------------------------------------------


def process(pid: int, ppid: int, job: str = "7", **environ: str) -> Process:
    return Process(pid, ppid, {"SLURM_JOB_ID": job, **environ})


BATCH = process(10, 1, SLURM_PROCID="0")  # the batch script has SLURM_PROCID=0, and so has its srun
SRUN = process(11, 10, SLURM_PROCID="0")
STEP = {"SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("processes", "rank", "expected"),
    [
        ([BATCH, SRUN], "0", []),
        ([BATCH, SRUN, process(20, 2, SLURM_PROCID="0", **STEP)], "0", [20]),
        # plain tasks with a child each
        (
            [process(20, 2, SLURM_PROCID="1", **STEP), process(21, 20, SLURM_PROCID="1", **STEP),
             process(30, 2, SLURM_PROCID="2", **STEP)],
            "1", [20, 21],
        ),
        # torchrun: the agent is a task, its workers have RANK
        (
            [process(20, 2, SLURM_PROCID="0", **STEP),
             process(21, 20, SLURM_PROCID="0", RANK="0", **STEP),
             process(22, 20, SLURM_PROCID="0", RANK="1", **STEP)],
            "0", [21],
        ),
        # robust-srun: the shim (physical SLURM_PROCID) is not the rank; the newest epoch counts
        (
            [process(20, 2, SLURM_PROCID="0", **STEP),
             process(21, 20, SLURM_PROCID="0", RANK="0", ROBUST_EPOCH="1", **STEP),
             process(22, 20, SLURM_PROCID="0", RANK="0", ROBUST_EPOCH="2", **STEP),
             Process(23, 22, {}),
             process(24, 20, SLURM_PROCID="1", RANK="1", ROBUST_EPOCH="2", **STEP)],
            "0", [22, 23],
        ),
        # a standby allocation: another Slurm job, the same robust job
        ([process(20, 2, job="9", ROBUST_JOB_ID="7", RANK="3", ROBUST_EPOCH="1")], "3", [20]),
        ([process(20, 2, job="8", SLURM_PROCID="0", **STEP)], "0", []),
    ],
)  # fmt: skip
def test_pick_rank(processes: list[Process], rank: str, expected: list[int]) -> None:
    assert pick_rank(processes, "7", rank) == expected


def test_parse_environ() -> None:
    assert parse_environ(b"A=b=c\0junk\0=x\0E=\0") == {"A": "b=c", "E": ""}


@given(st.binary())
def test_parse_environ_never_fails(raw: bytes) -> None:
    assert all(name for name in parse_environ(raw))


# -- records ----------------------------------------------------------------------------------


def test_parse_record() -> None:
    text = "JobId=3 JobName=a b\n   Reason=None Nodes=n[1-2]\n   Command=/x y\n   Empty=\n"
    assert parse_record(text) == {
        "JobId": "3",
        "JobName": "a b",
        "Reason": "None",
        "Nodes": "n[1-2]",
        "Command": "/x y",
        "Empty": "",
    }


keys = st.from_regex(r"[A-Z][A-Za-z]{0,8}", fullmatch=True)
values = st.text("abc123/.,[]- ", max_size=12).map(str.strip)


@given(st.dictionaries(keys, values, min_size=1))
def test_parse_record_reads_what_was_written(record: dict[str, str]) -> None:
    assert parse_record(" ".join(f"{k}={v}" for k, v in record.items())) == record


@given(st.text())
def test_parsers_never_fail(text: str) -> None:
    parse_record(text)
    parse_nodes(text)
    parse_state(text)
    started({"SlurmdStartTime": text})


def node(state: str, reason: str = "", start: str = "2026-01-02T03:04:05") -> dict[str, str]:
    return {"State": state, "Reason": reason, "SlurmdStartTime": start}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (node("DOWN", "Not responding [root@2026-01-01T00:00:00]"), True),
        (node("DOWN", "Node unexpectedly rebooted [root@…]"), True),
        (node("DOWN", "robust: ECC [root@…]"), False),
        (node("DOWN+DRAIN", "Not responding [root@…]"), False),
        (node("IDLE", "Not responding [root@…]"), False),
    ],
)
def test_wants_resume(record: dict[str, str], expected: bool) -> None:
    assert wants_resume(record) is expected


@pytest.mark.parametrize(
    ("record", "began", "expected"),
    [
        (node("IDLE"), 0, True),
        (node("MIXED+DRAIN"), 0, True),
        (node("DOWN+DRAIN", "mine"), 0, True),
        (node("DOWN"), 0, False),
        (node("IDLE*"), 0, False),
        (node("UNKNOWN+NOT_RESPONDING"), 0, False),
        (node("IDLE"), 1767323045.9, True),  # the same second
        (node("IDLE"), 1767323046.0, False),
        (node("IDLE", start="None"), 1.0, False),
    ],
)
def test_usable(record: dict[str, str], began: float, expected: bool) -> None:
    assert usable(record, began) is expected


# -- fill -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leave", "expected"), [("0", 0), ("4096", 4096), ("5%", 50), ("0.5%", 5), ("100%", 1000)]
)
def test_what_fill_leaves(leave: str, expected: int) -> None:
    assert inside.to_bytes(leave, 1000) == expected


@pytest.mark.parametrize("leave", ["", "x", "-1", "-5%", "%"])
def test_bad_leave(leave: str) -> None:
    with pytest.raises(LabError, match="--leave"):
        inside.to_bytes(leave, 1000)


# -- outages ----------------------------------------------------------------------------------


def test_a_daemon_that_outlives_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "_TERM_S", 0.2)
    argv = ["sh", "-c", "trap '' TERM; echo ready; exec sleep 60"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as deaf:
        assert deaf.stdout is not None and deaf.stdout.readline()
        outages._end(deaf.pid, "slurmctld")
        assert deaf.wait(10) == -signal.SIGKILL


# -- nodes that Slurm drained by itself -----------------------------------------------------------

_EXTERN = "[11.extern] error: *** EXTERN STEP FOR 11 STEPD TERMINATED ON n2 AT 18:51:56 DUE TO JOB"
_STEP = "[11.0] error: *** STEP 11.0 STEPD TERMINATED ON n2 AT 18:51:57 DUE TO JOB"


@pytest.mark.parametrize(
    ("log", "by_slurm"),
    [("", False), (_EXTERN, True), (_STEP, False), (f"{_EXTERN}\n{_STEP}", False)],
)
def test_a_step_that_outlives_sigkill_is_slurms_own_or_ours(log: str, by_slurm: bool) -> None:
    assert lab_nodes.unkillable_by_slurm(log) is by_slurm
