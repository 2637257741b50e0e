"""The disk family: space, inodes, whose files fill it, and the disks under it."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
from fake_host import MOUNTINFO, SPOOL, healthy, ids
from fake_system import NOW, FakeSystem, context

from health.checks.host import disk
from health.node import leftover_files
from health.node.leftover_files import holdings
from health.node.mountinfo import visible
from health.node.system import Disk, PathEntry

run = disk.CHECK.run
GIB = 1 << 30
MIB = 1 << 20


def space(free: int, total: int = 1000 * GIB, inodes_free: int = 5_000_000) -> Disk:
    return Disk(total, free, 6_000_000, inodes_free, False)


def owned(uid: int, size: int, kind: str = "file", mode: int = 0o600) -> PathEntry:
    return PathEntry(kind, mode, uid, size, NOW)


@pytest.mark.parametrize(
    ("disk_", "level"),
    [
        (space(800 * GIB), ""),
        (space(20 * GIB), ""),  # 2 % of a large disk is a lot
        (space(9 * GIB), "low"),
        (space(400 * MIB), "full"),
        (space(400 * MIB, total=2 * GIB), ""),  # 20 % of a small one is not full
        (space(64 * MIB, total=64 * MIB), ""),  # /dev/shm of a container
        (space(0, total=0), ""),  # no file system with a size
        (space(0, total=4096), "full"),
        (space(0)._replace(read_only=True), ""),  # an image is always full
    ],
)
def test_judge_space(disk_: Disk, level: str) -> None:
    assert disk.judge_space(disk_, None).level == level


@pytest.mark.parametrize(
    ("free", "minimum", "level"),
    [(99 * GIB, 100 * GIB, "full"), (100 * GIB, 100 * GIB, ""), (MIB, MIB, ""), (0, 0, "")],
)
def test_the_sites_own_limit_is_the_only_one(free: int, minimum: int, level: str) -> None:
    assert disk.judge_space(space(free), minimum).level == level


@pytest.mark.parametrize(
    ("free", "inodes", "level"),
    [
        (5_000_000, 6_000_000, ""),
        (40_000, 6_000_000, "low"),
        (100, 6_000_000, "full"),
        (10, 60, ""),
        (0, 0, ""),  # btrfs has no such limit
    ],
)
def test_judge_inodes(free: int, inodes: int, level: str) -> None:
    assert disk.judge_inodes(Disk(GIB, GIB, inodes, free, False)).level == level


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 * GIB, "5.0 GiB"),
        (3 << 50, "3072.0 TiB"),
    ],
)
def test_size(count: int, text: str) -> None:
    assert disk.size(count) == text


def leftovers(uid: int, size: int) -> dict[str, PathEntry]:
    return {"/tmp/data": owned(uid, 4096, "dir"), "/tmp/data/x": owned(uid, size)}


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ({}, ("disk-full", "user", "clear-leftovers")),  # it may have no name any more
        (leftovers(1003, 500 * GIB), ("disk-full-leftovers", "user", "clear-leftovers")),
        (leftovers(1003, 10 * MIB), ("disk-full", "user", "clear-leftovers")),
        (leftovers(0, 500 * GIB), ("disk-full", "user", "clear-leftovers")),  # and the other 500?
        (leftovers(0, 1000 * GIB - 450 * MIB), ("disk-full", "node", "none")),  # all root's
    ],
)
def test_who_fills_it(entries: dict[str, PathEntry], found: tuple[str, str, str]) -> None:
    [finding] = run(healthy(entries=entries, disks={"/tmp": space(100 * MIB)}))
    assert (finding.check, finding.cls, finding.action) == found
    assert (finding.status, finding.device) == ("FAIL", "/tmp")
    if finding.check == "disk-full-leftovers":
        assert "uid 1003 holds 500.0 GiB in 2 files" in finding.evidence
        assert finding.uid == 1003


@pytest.mark.parametrize(
    ("where", "sockets", "status"),
    [
        ("prolog", [], "FAIL"),
        ("prolog", ["n1_55.4294967292"], "FAIL"),  # the new job would meet a full disk
        ("sweep", [], "FAIL"),
        ("sweep", ["n1_55.4294967292"], "WARN"),  # a job that runs may fill its /tmp
        ("epilog", ["n1_7.0"], "FAIL"),  # its own last step
        ("epilog", ["n1_55.0", "n1_7.0"], "WARN"),
    ],
)
def test_a_running_job_may_fill_it(where: str, sockets: list[str], status: str) -> None:
    system = healthy(
        entries=leftovers(1003, 500 * GIB),
        disks={"/tmp": space(100 * MIB)},
        more={f"{SPOOL}/{name}": "" for name in sockets},
        context=context(where),
    )
    assert ids(run(system)) == [(status, "disk-full-leftovers", "/tmp")]


def test_inodes_taken_by_a_user() -> None:
    entries = {f"/tmp/many/{n}": owned(1003, 0) for n in range(6000)}
    system = healthy(entries=entries, disks={"/tmp": space(500 * GIB, inodes_free=10)})
    [finding] = run(system)
    assert (finding.check, finding.cls, finding.status) == ("inodes-full", "user", "FAIL")


DECOYS = {f"/tmp/a{n}": owned(1003, 0) for n in range(3000)}


@pytest.mark.parametrize(
    "entries",
    [DECOYS | {"/tmp/z": owned(1003, 500 * GIB)},
     {"/tmp/many": owned(1003, 2 * MIB, "dir"), "/tmp/many/z": owned(1003, 500 * GIB)}],
    ids=["decoys", "one huge directory"],
)  # fmt: skip
def test_a_user_cannot_hide_what_fills_it(entries: dict[str, PathEntry]) -> None:
    [finding] = run(healthy(entries=entries, disks={"/tmp": space(100 * MIB)}))
    assert (finding.check, finding.cls) == ("disk-full-leftovers", "user")


@pytest.mark.parametrize("which", ["space", "inodes"])
def test_a_look_that_did_not_see_everything_blames_no_node(which: str) -> None:
    """Decoys, a huge directory or a slow disk: what was not seen may be the users'."""
    full = space(100 * MIB) if which == "space" else space(500 * GIB, inodes_free=10)
    system = healthy(entries=leftovers(1003, MIB), disks={"/tmp": full})
    system.whole = False
    [finding] = run(system)
    name = {"space": "disk-full", "inodes": "inodes-full"}[which]
    assert (finding.check, finding.cls, finding.action) == (name, "user", "clear-leftovers")
    assert "the search for the files' owners stopped after" in finding.evidence


def test_inodes_without_a_name_are_no_nodes_fault() -> None:
    [finding] = run(healthy(disks={"/tmp": space(500 * GIB, inodes_free=10)}))
    assert (finding.check, finding.cls, finding.action) == (
        "inodes-full",
        "user",
        "clear-leftovers",
    )


@pytest.mark.parametrize("uid", [1003, 0])
def test_a_site_s_own_path_is_looked_through_too(uid: int) -> None:
    entries = {"/local/a": owned(uid, 4096, "dir"), "/local/a/b": owned(uid, 950 * GIB)}
    system = healthy(
        entries=entries,
        disks={"/local": space(GIB)},
        options={"disk": {"minimum": {"/local": 100}}},
        dirs=["/local"],
    )
    [finding] = run(system)
    assert finding.cls == ("user" if uid else "node") and finding.device == "/local"


def test_all_looks_together_take_no_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The family has 4 s in all, and a node with many full disks must not be called hung."""
    given: list[float] = []
    real = FakeSystem.usage

    def usage(self: FakeSystem, tops: Any, deadline_s: float) -> Any:
        given.append(deadline_s)
        return real(self, tops, deadline_s)

    monkeypatch.setattr(FakeSystem, "usage", usage)
    run(healthy(disks=dict.fromkeys(("/", "/tmp", "/dev/shm"), space(100 * MIB))))
    assert len(given) == 3 and sum(given) <= disk.LOOK_S + 1e-9


def test_network_file_systems_that_do_not_answer_take_one_second_together() -> None:
    paths = ("/scratch", "/software", "/home")
    system = healthy(
        probes=dict.fromkeys(paths, TimeoutError()),
        options={"disk": {"minimum": dict.fromkeys(paths, 1)}},
    )
    assert run(system) == []
    assert len([asked for asked in system.asked if asked.startswith("probe")]) == 1


def test_a_full_network_file_system_is_no_nodes_fault() -> None:
    system = healthy(
        probes={"/scratch": None},
        disks={"/scratch": space(GIB)},
        options={"disk": {"minimum": {"/scratch": 100}}},
    )
    [finding] = run(system)
    assert (finding.check, finding.cls, finding.status) == ("disk-full", "user", "FAIL")
    assert not [asked for asked in system.asked if asked.startswith("usage")]


def test_one_file_system_is_judged_once() -> None:
    full = space(100 * MIB)
    disks = dict.fromkeys(("/", "/var", "/var/tmp", SPOOL), full)
    assert ids(run(healthy(disks=disks))) == [("FAIL", "disk-full", "/")]


def test_a_link_to_a_network_file_system_is_not_followed() -> None:
    system = healthy(links={"/var/tmp": "/scratch/tmp"}, dirs=["/scratch/tmp"])
    assert run(system) == []
    assert not [asked for asked in system.asked if asked.startswith("disk /scratch")]


@pytest.mark.parametrize(
    ("probe", "free", "found"),
    [
        (None, 50 * GIB, [("FAIL", "disk-full", "/scratch")]),
        (None, 200 * GIB, []),
        (TimeoutError(errno.ETIMEDOUT, "no answer"), 50 * GIB, []),  # mounts says so
        (OSError(errno.ESTALE, "stale file handle"), 50 * GIB, []),  # and of its server
        (OSError(errno.EKEYEXPIRED, "key has expired"), 50 * GIB, []),
    ],
)
def test_minimum_of_a_network_file_system(
    probe: OSError | None, free: int, found: list[tuple[str, str, str]]
) -> None:
    system = healthy(
        options={"disk": {"minimum": {"/scratch": 100}}},
        probes={"/scratch": probe},
        disks={"/scratch": space(free)},
    )
    assert ids(run(system)) == found
    assert system.asked["disk /scratch"] == (probe is None)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE])
def test_a_probe_that_could_not_start_is_the_tools_trouble(code: int) -> None:
    system = healthy(
        options={"disk": {"minimum": {"/scratch": 100}}},
        probes={"/scratch": OSError(code, os.strerror(code))},
    )
    with pytest.raises(OSError, match=os.strerror(code)):
        run(system)


@pytest.mark.parametrize("table", [{"scratch": 1}, {"/scratch": "much"}, {"/scratch": -1}])
def test_a_minimum_that_cannot_be_used(table: dict[str, Any]) -> None:
    assert ids(run(healthy(options={"disk": {"minimum": table}}))) == [("WARN", "disk-setting", "")]


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (errno.EIO, [("FAIL", "disk-broken", "/tmp")]),
        (errno.ENOENT, []),
        (errno.EACCES, []),
    ],
)
def test_a_file_system_that_cannot_be_asked(code: int, found: list[Any]) -> None:
    assert ids(run(healthy(disks={"/tmp": OSError(code, os.strerror(code))}))) == found


def test_what_a_user_mounted_tells_nothing_of_the_nodes_disks() -> None:
    own = "60 27 0:60 / /local rw - fuse own rw,user_id=1003,group_id=1003\n"
    system = healthy(
        more={"/proc/self/mountinfo": MOUNTINFO + own},
        disks={"/local": OSError(errno.EIO, "I/O error")},
        options={"disk": {"minimum": {"/local": 1}}},
        dirs=["/local"],
    )
    assert run(system) == []


@pytest.mark.parametrize(
    ("more", "options", "fleet", "found"),
    [
        ({"/sys/class/nvme/nvme0/state": "dead\n"}, {}, {}, [("FAIL", "nvme-dead", "nvme0")]),
        ({"/sys/class/nvme/nvme0/state": "resetting\n"}, {}, {}, []),
        ({}, {"nvme": 2}, {}, [("FAIL", "nvme-missing", "")]),
        ({}, {"nvme": 1}, {"nvme": 9}, []),
        ({}, {}, {"nvme": 2}, [("FAIL", "nvme-missing", "")]),
        ({}, {}, {"nvme": "two"}, []),
        ({}, {}, {"nvme": 2, "nvme_local": 1}, []),
        ({}, {}, {"nvme": 1, "nvme_local": 8}, []),  # edited, or of an older release
        ({}, {}, {"nvme": 1, "nvme_local": "two"}, []),
        ({}, {}, {"nvme": 8, "nvme_local": 2}, [("FAIL", "nvme-missing", "")]),
        # As many in both: those over a network do not count.
        (
            {"/sys/class/nvme/nvme1/transport": "tcp"},
            {},
            {"nvme": 2, "nvme_local": 2},
            [("FAIL", "nvme-missing", "")],
        ),
        (
            {"/sys/class/nvme/nvme1/transport": "tcp"},
            {},
            {"nvme_local": 2},
            [("FAIL", "nvme-missing", "")],
        ),
        ({"/sys/class/nvme/nvme1/transport": "tcp"}, {}, {"nvme": 2}, []),  # an old record
        (
            {"/sys/class/nvme/nvme1/state": "dead", "/sys/class/nvme/nvme1/transport": "tcp"},
            {"nvme": 1},
            {},
            [],
        ),
    ],
)
def test_nvme(
    more: dict[str, str], options: dict[str, Any], fleet: dict[str, Any], found: list[Any]
) -> None:
    assert ids(run(healthy(more=more, options={"disk": options}, fleet=fleet))) == found


MDSTAT = """\
Personalities : [raid1] [raid0]
md1 : active raid1 nvme1n1p1[1] nvme0n1p1[0](F)
      52427776 blocks super 1.2 [2/{alive}] [{map}]
      bitmap: 1/1 pages [4KB], 65536KB chunk

md0 : active raid0 nvme2n1[0] nvme3n1[1]
      7501211648 blocks super 1.2 512k chunks

unused devices: <none>
"""


@pytest.mark.parametrize(
    ("alive", "members", "found"),
    [("2", "UU", []), ("1", "U_", [("WARN", "raid-degraded", "md1")])],
)
def test_raid(alive: str, members: str, found: list[Any]) -> None:
    mdstat = MDSTAT.replace("{alive}", alive).replace("{map}", members)
    assert ids(run(healthy(more={"/proc/mdstat": mdstat}))) == found


# --- the look into /tmp -------------------------------------------------------------------------

TABLE = visible(MOUNTINFO)


def look(entries: dict[str, PathEntry], path: str = "/tmp", total: int = 1000 * GIB) -> Any:
    return holdings(FakeSystem(entries=entries, dirs=["/tmp"]), path, TABLE, total)


def test_only_the_same_file_system_counts() -> None:
    entries = {
        "/tmp/a": owned(1001, 3 * GIB),
        "/dev/shm/b": owned(1002, 5 * GIB),
        "/var/tmp/c": owned(1003, 7 * GIB),
    }
    assert look(entries).bytes == 3 * GIB
    assert look(entries, "/dev/shm").bytes == 5 * GIB
    assert look(entries, "/").bytes == 7 * GIB  # /var/tmp lies on /


def test_a_file_cannot_claim_more_than_the_disk_has() -> None:
    assert look({"/tmp/sparse": owned(1001, 1 << 60)}, total=GIB).bytes == GIB


def test_the_look_on_a_real_directory(tmp_path: Path) -> None:
    """Space is what lies on the disk, not what a file claims; no link is followed."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "full").write_bytes(b"x" * 200_000)
    with (tmp_path / "a" / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "away").symlink_to("/usr")
    usage = leftover_files.walk([str(tmp_path), str(tmp_path / "away"), "/nowhere"], 30.0)
    assert usage.whole and usage.entries == 5
    ((uid, size, files),) = usage.owners
    assert (uid, files) == (os.geteuid(), 5) and 200_000 <= size < 1_000_000


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_files_without_a_name_are_found(tmp_path: Path, how: str) -> None:
    """Files count for their owner, or for the user whose process holds one of the system's."""
    path = tmp_path / "held"
    with path.open("w+b") as file:
        file.write(b"x" * 200_000)
        file.flush()
        kept = mmap.mmap(file.fileno(), 0) if how == "mapped" else None
        if kept is not None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, file.fileno())
        os.chown(path, 33001, 33001)
        path.unlink()
        [[uid, size, files]] = leftover_files.unlinked([str(tmp_path)], 30.0)
        assert (uid, files) == (33001, 1) and size >= 200_000
        if kept is not None:
            kept.close()


def test_a_second_name_adds_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 200_000)
    for name in "bcde":
        (tmp_path / name).hardlink_to(tmp_path / "a")
    usage = leftover_files.walk([str(tmp_path)], 30.0)
    assert 190_000 < usage.owners[0][1] < 250_000


@pytest.mark.parametrize("end", ["", "/", "//", "/."])
def test_a_mount_point_is_not_touched_however_the_directory_is_written(
    tmp_path: Path, end: str
) -> None:
    """A user's own file system there may never answer."""
    for name in ("a", "mounted"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    usage = leftover_files.walk([f"{tmp_path}{end}"], 30.0, {str(tmp_path / "mounted")})
    assert usage.owners[0][2] == 2 and usage.whole


@pytest.mark.slow
def test_decoys_do_not_end_the_look(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number in range(5000):
        (tmp_path / f"decoy{number}").touch()
    (tmp_path / "a" / "full").write_bytes(b"x" * 200_000)
    usage = leftover_files.walk([str(tmp_path)], 60.0)
    assert usage.whole and usage.entries == 5002 and usage.owners[0][1] >= 200_000


@pytest.mark.parametrize("why", ["time", "depth"])
def test_a_look_that_cannot_see_everything_says_so(tmp_path: Path, why: str) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(20 if why == "depth" else 0):  # longer than a path may be
        os.mkdir("d" * 250, dir_fd=here)
        here, above = os.open("d" * 250, os.O_RDONLY, dir_fd=here), here
        os.close(above)
    os.mkdir("d", dir_fd=here)
    os.close(here)
    usage = leftover_files.walk([str(tmp_path)], 30.0 if why == "depth" else 0.0)
    assert not usage.whole
    assert "stopped after" in leftover_files.judge(usage, GIB).said


def test_names_are_not_repeated() -> None:
    held = look({"/tmp/\x1b[2Jevil\nFAIL": owned(1001, GIB)})
    assert held.said == "uid 1001 holds 1.0 GiB in 1 file"
