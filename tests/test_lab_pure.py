"""The parts of the lab that are functions of data."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab import gpu_faults, hardware, inside, kernlog
from lab import spec as texts
from lab.errors import LabError
from lab.hardware import HCAS, Hardware, Link
from lab.mounts import Cover, plan_covers
from lab.ranks import Process, parse_environ, parse_ppid, pick_rank
from lab.records import parse_nodes, parse_record, parse_state, started, usable, wants_resume
from lab.spec import LabSpec

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
        # a companion allocation: another Slurm job, the same robust job
        ([process(20, 2, job="9", ROBUST_JOB_ID="7", RANK="3", ROBUST_EPOCH="1")], "3", [20]),
        ([process(20, 2, job="8", SLURM_PROCID="0", **STEP)], "0", []),
    ],
)  # fmt: skip
def test_pick_rank(processes: list[Process], rank: str, expected: list[int]) -> None:
    assert pick_rank(processes, "7", rank) == expected


def test_parse_environ_and_stat() -> None:
    assert parse_environ(b"A=b=c\0junk\0=x\0E=\0") == {"A": "b=c", "E": ""}
    assert parse_ppid("12 (a) b (c) S 7 12 12") == 7


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


# -- hardware ---------------------------------------------------------------------------------

BOARD = Hardware("n1", 8)
GPU3 = "devices/pci0000:60/0000:60:01.0/0000:61:00.0"


def test_gpus_of_different_nodes_differ_and_stay() -> None:
    found = [hardware.uuid(node, index) for node in ("n1", "n2") for index in range(64)]
    assert len(set(found)) == len(found)
    assert hardware.uuid("n1", 0) == found[0]
    assert len({hardware.pci(index) for index in range(64)}) == 64
    assert len({hardware.serial("n1", index) for index in range(64)}) == 64


def test_sys_tree_shows_the_gpus_and_ports() -> None:
    tree = hardware.sys_tree(BOARD)
    links = [path for path in tree if path.startswith("bus/pci/devices/")]
    targets = {path: tree[path] for path in links}
    gpus = [
        address
        for address, link in targets.items()
        if isinstance(link, Link)
        and tree[f"{link.target.removeprefix('../../../')}/vendor"] == "0x10de\n"
        and str(tree[f"{link.target.removeprefix('../../../')}/class"]).startswith("0x03")
    ]
    assert len(gpus) == 8
    assert tree[f"{GPU3}/current_link_width"] == "16\n"
    assert tree[f"{GPU3}/driver"] == Link("../../../../bus/pci/drivers/nvidia")
    assert [path for path in tree if path.startswith("class/infiniband/")] == [
        f"class/infiniband/{hca}" for hca in HCAS
    ]


@pytest.mark.parametrize(
    ("nvml", "width", "speed"),
    [
        ({"gpu3.pcie.width": "8"}, "8\n", "32.0 GT/s PCIe\n"),
        ({"gpu3.pcie.generation": "1"}, "16\n", "2.5 GT/s PCIe\n"),
        ({"gpu3.lost": "handle"}, "63\n", "Unknown\n"),
        ({"gpu3.lost": "absent"}, None, None),
    ],
)
def test_sys_tree_follows_the_faults(
    nvml: dict[str, str], width: str | None, speed: str | None
) -> None:
    tree = hardware.sys_tree(Hardware("n1", 8, nvml))
    assert tree.get(f"{GPU3}/current_link_width") == width
    assert tree.get(f"{GPU3}/current_link_speed") == speed
    assert ("bus/pci/devices/0000:61:00.0" in tree) is (width is not None)
    assert "bus/pci/devices/0000:60:01.0" in tree  # its port


def test_a_port_counts_how_often_it_went_down() -> None:
    twice = BOARD.with_port("mlx5_1", False).with_port("mlx5_1", True).with_port("mlx5_1", False)
    tree = hardware.sys_tree(twice)
    port = next(path.rpartition("/")[0] for path in tree if "/mlx5_1/ports/1/state" in path)
    assert tree[f"{port}/state"] == "1: DOWN\n"
    assert tree[f"{port}/counters/link_downed"] == "2\n"
    back = hardware.sys_tree(twice.with_port("mlx5_1", True))
    assert back[f"{port}/state"] == "4: ACTIVE\n"


def test_changes_make_the_new_tree_of_the_old() -> None:
    old = hardware.sys_tree(BOARD)
    new = hardware.sys_tree(Hardware("n1", 8, {"gpu3.lost": "absent", "driver": "1.2"}))
    tree = dict(old)
    for path, value in hardware.changes(old, new):
        if value is None:
            del tree[path]
        else:
            tree[path] = value
    assert tree == new
    assert not list(hardware.changes(new, new))


def test_boot_log_is_over_before_anything_runs() -> None:
    lines = kernlog.boot_log(8)
    text = kernlog.records(lines, 0, 0, 100)
    assert len(text.splitlines()) == len(lines)
    assert int(text.splitlines()[-1].split(",")[2]) < 10_000
    assert "NVRM" not in kernlog.records(kernlog.boot_log(0), 0, 0, 100)


def after(*steps: tuple[str, str], index: int | None = 3) -> tuple[Hardware, list[str]]:
    """The board after some changes to GPU 3, and what the kernel logged."""
    board, log = BOARD, list[str]()
    for what, value in steps:
        done = gpu_faults.change(board, index, what, value)
        board = board.with_nvml(done.nvml)
        log += [line.text.removeprefix("NVRM: Xid (PCI:0000:61:00): ") for line in done.log]
    return board, log


@pytest.mark.parametrize(
    ("steps", "nvml", "begin"),
    [
        ([("xid", "79")], {}, ["79, GPU has fallen off the bus."]),
        ([("xid", "999 what so ever")], {}, ["999, what so ever"]),
        (
            [("ecc", "2"), ("ecc", "1")],
            {"gpu3.ecc.volatile_uncorrected": "1", "gpu3.ecc.aggregate_uncorrected": "3"},
            ["48, DBE", "48, DBE"],
        ),
        (
            [("lost", "handle")],
            {"gpu3.lost": "handle"},
            ["79, ", "NVRM: GPU 0000:61:00.0: GPU has", "NVRM: GPU 0000:61:00.0: GPU serial",
             "154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"],
        ),
        ([("remap_failed", "1")], {"gpu3.remap.failed": "1"}, ["64, "]),
        ([("remap_pending", "1")], {"gpu3.remap.pending": "1", "gpu3.remap.uncorrected": "1"},
         ["63, "]),
        ([("pcie_width", "8"), ("temp", "95")],
         {"gpu3.pcie.width": "8", "gpu3.temperature.gpu": "95"}, []),
        ([("throttle", "hw-slowdown,hw-thermal")], {"gpu3.throttle": "0x48"}, []),
        ([("recovery_action", "1"), ("recovery_action", "1")], {"gpu3.recovery_action": "1"},
         ["154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"]),
        ([("set", "nvlink4.active=0")], {"gpu3.nvlink4.active": "0"}, []),
        ([("nvml_hang", "sleep")], {"gpu3.hang": "sleep"}, []),
        ([("ecc", "2"), ("heal", "")], {}, ["48, "]),
        # a reset cures what is volatile, not what is in the board
        ([("ecc", "2"), ("remap_pending", "1"), ("remap_failed", "1"), ("recovery_action", "1"),
          ("pcie_width", "8"), ("reset", "")],
         {"gpu3.ecc.aggregate_uncorrected": "2", "gpu3.remap.uncorrected": "1",
          "gpu3.remap.failed": "1", "gpu3.pcie.width": "8"},
         ["48, ", "63, ", "64, ", "154, "]),
        ([("recovery_action", "2"), ("reset", "")], {"gpu3.recovery_action": "2"}, ["154, "]),
    ],
)  # fmt: skip
def test_gpu_faults(steps: list[tuple[str, str]], nvml: dict[str, str], begin: list[str]) -> None:
    board, log = after(*steps)
    assert board.nvml == nvml
    assert [line[: len(b)] for line, b in zip(log, begin, strict=True)] == begin


def test_faults_of_the_node() -> None:
    steps = [("nvml_hang", "sleep"), ("driver", "1.2"), ("set", "init=NVML_ERROR_UNKNOWN")]
    board, log = after(*steps, index=None)
    assert board.nvml == {"hang": "sleep", "driver": "1.2", "init": "NVML_ERROR_UNKNOWN"}
    assert log == []
    assert after(*steps, ("heal", ""), index=None)[0].nvml == {}


@pytest.mark.parametrize(
    ("index", "what", "value", "word"),
    [
        (8, "xid", "79", "no GPU 8; there are: 0..7"),
        (None, "xid", "79", "say which GPU"),
        (3, "driver", "1.2", "about the node"),
        (None, "driver", "x", "wants a version"),
        (3, "xid", "x", "wants a number"),
        (3, "temp", "-1", "wants 0..200"),
        (3, "lost", "no", "handle, calls, absent"),
        (3, "throttle", "hw-slowdown,x", "'x': want some of"),
        (3, "set", "no equals", "KEY=VALUE"),
        (3, "set", "a=b\nc=d", "KEY=VALUE"),
        (3, "nothing", "", "about the node"),
    ],
)
def test_bad_faults(index: int | None, what: str, value: str, word: str) -> None:
    with pytest.raises(LabError, match=word):
        gpu_faults.change(BOARD, index, what, value)


def test_no_gpus_no_faults_and_no_reset_of_what_is_gone() -> None:
    with pytest.raises(LabError, match="--gpus N"):
        gpu_faults.change(Hardware("n1", 0), 0, "xid", "79")
    gone = Hardware("n1", 8, {"gpu3.lost": "handle"})
    with pytest.raises(LabError, match="off the bus"):
        gpu_faults.change(gone, 3, "reset", "")


@pytest.mark.parametrize(
    ("leave", "expected"), [("0", 0), ("4096", 4096), ("5%", 50), ("0.5%", 5), ("100%", 1000)]
)
def test_what_fill_leaves(leave: str, expected: int) -> None:
    assert inside.to_bytes(leave, 1000) == expected


@pytest.mark.parametrize("leave", ["", "x", "-1", "-5%", "%"])
def test_bad_leave(leave: str) -> None:
    with pytest.raises(LabError, match="--leave"):
        inside.to_bytes(leave, 1000)
