"""The mounts family and the table of mounts under it."""

from __future__ import annotations

import errno
import os
import re

import pytest
from fake_host import FSTAB, MOUNTINFO, healthy, ids
from fake_system import FakeSystem
from hypothesis import given
from hypothesis import strategies as st

from health.checks.host import mounts
from health.checks.host.mounts import RequiredMount, parse_wanted
from health.node import mountinfo

run = mounts.CHECK.run


def fail(code: int) -> OSError:
    return OSError(code, os.strerror(code))


# --- the tables -------------------------------------------------------------------------------


def test_mountinfo_of_a_plain_node() -> None:
    table = mountinfo.visible(MOUNTINFO)
    assert table["/home"].fstype == "nfs4"
    assert table["/home"].source == "srv:/home"
    assert table["/software"].read_only
    assert not table["/"].read_only
    assert mountinfo.holding(table, "/tmp/a/b") == table["/tmp"]
    assert mountinfo.holding(table, "/etc/x") == table["/"]


def test_mountinfo_escapes() -> None:
    line = r"50 27 0:50 / /my\040dir\011x\134y rw - nfs4 srv:/a\040b rw"
    table = mountinfo.visible(line)
    assert table["/my dir\tx\\y"].source == "srv:/a b"


def test_the_top_of_stacked_mounts_wins_in_any_order() -> None:
    lines = [
        "27 1 8:1 / / rw - ext4 /dev/sda1 rw",
        "50 27 0:50 / /data rw - nfs4 old:/data rw",
        "51 50 0:51 / /data rw - nfs4 new:/data rw",
    ]
    for order in (lines, lines[::-1]):
        assert mountinfo.visible("\n".join(order))["/data"].source == "new:/data"


def test_a_mount_below_a_later_mount_is_out_of_sight() -> None:
    text = (
        "27 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "50 27 0:50 / /data/set rw - nfs4 srv:/set rw\n"
        "51 27 0:51 / /data rw - tmpfs tmpfs rw\n"
    )
    assert set(mountinfo.visible(text)) == {"/", "/data"}


def test_the_root_of_a_container_has_a_parent_nobody_sees() -> None:
    text = (
        "600 500 0:60 / / rw - overlay overlay rw\n"
        "601 600 0:61 / /proc rw - proc proc rw\n"
        "700 499 0:70 / /odd rw - nfs4 srv:/odd rw\n"
    )
    assert set(mountinfo.visible(text)) == {"/", "/proc", "/odd"}


@given(st.text(max_size=400))
def test_any_text_is_a_table(text: str) -> None:
    assert all(mount.point == point for point, mount in mountinfo.visible(text).items())
    assert all(line.point.startswith("/") for line in mountinfo.fstab(text))


plain = st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=12).filter(
    lambda s: "/" not in s and "\0" not in s
)


@given(plain)
def test_what_the_kernel_escapes_is_read_back(name: str) -> None:
    escaped = re.sub(r"[ \t\n\\]", lambda m: f"\\{ord(m[0]):03o}", name)
    line = f"9 1 0:9 / /{escaped} rw - nfs4 srv:/x rw"
    if len(line.splitlines()) == 1:  # splitlines knows more line ends than the kernel escapes
        assert f"/{name}" in mountinfo.visible(line)


def test_resolve_follows_links_but_never_onto_a_network_file_system() -> None:
    links = {"/data": "scratch/data", "/usr/tmp": "../var/tmp", "/home/me": "/etc"}
    asked = []

    def link(path: str) -> str:
        asked.append(path)
        if path not in links:
            raise fail(errno.EINVAL)
        return links[path]

    table = mountinfo.visible(MOUNTINFO)
    assert mountinfo.resolve(table, "/data/x", link) == "/scratch/data/x"
    assert mountinfo.resolve(table, "/usr/tmp", link) == "/var/tmp"
    assert mountinfo.resolve(table, "/home/me", link) == "/home/me"
    assert not [path for path in asked if path.startswith(("/home", "/scratch"))]


def test_resolve_ends_in_a_ring_of_links() -> None:
    assert mountinfo.resolve({}, "/a", lambda path: "/a") == "/a"


@pytest.mark.parametrize(
    ("entry", "wanted"),
    [
        ("/scratch", RequiredMount("/scratch")),
        ("/scratch/", RequiredMount("/scratch")),
        ("/data:ro", RequiredMount("/data", read_only=True)),
        ("/home:rw,type=nfs4", RequiredMount("/home", fstype="nfs4")),
        ("/work:write", RequiredMount("/work", write=True)),
        ("/odd:/path", RequiredMount("/odd:/path")),
    ],
)
def test_parse_wanted(entry: str, wanted: RequiredMount) -> None:
    assert parse_wanted(entry) == wanted


@pytest.mark.parametrize("entry", ["scratch", "", "/a:rwx", "/a:type=", ":ro", "/a:ro=1"])
def test_parse_wanted_says_what_is_wrong(entry: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(entry))):
        parse_wanted(entry)


# --- the family -------------------------------------------------------------------------------


def without(mount: str) -> dict[str, str]:
    kept = [line for line in MOUNTINFO.splitlines() if f" {mount} " not in line]
    return {"/proc/self/mountinfo": "\n".join(kept) + "\n"}


def changed(old: str, new: str) -> dict[str, str]:
    assert old in MOUNTINFO
    return {"/proc/self/mountinfo": MOUNTINFO.replace(old, new)}


@pytest.mark.parametrize(
    ("more", "found"),
    [
        (without("/home"), [("FAIL", "mount-missing", "/home")]),
        (
            without("/home") | {"/etc/fstab": FSTAB.replace("hard,_netdev", "nofail")},
            [("WARN", "mount-missing", "/home")],
        ),
        (without("/home") | {"/etc/fstab": FSTAB.replace("hard,_netdev", "noauto")}, []),
        (changed("/scratch rw", "/scratch ro"), [("FAIL", "mount-read-only", "/scratch")]),
        (
            changed("rw,vers=4.2,hard,addr", "ro,vers=4.2,hard,addr"),
            [("FAIL", "mount-read-only", "/home")],
        ),
        (
            changed(
                "/software ro,relatime shared:42 - nfs4 srv:/software ro",
                "/software rw - nfs4 srv:/software rw",
            ),
            [("WARN", "mount-writable", "/software")],
        ),
        (
            changed("rw,errors=remount-ro", "ro,errors=remount-ro"),
            [("FAIL", "filesystem-failed", "/")],
        ),
        (changed("rw,errors", "rw,emergency_ro,errors"), [("FAIL", "filesystem-failed", "/")]),
        (changed("rw,attr2", "rw,shutdown,attr2"), [("FAIL", "filesystem-failed", "/tmp")]),
        # A read-only view of a file system that is itself writable is somebody's wish.
        (changed("/ rw,relatime", "/ ro,relatime"), []),
    ],
)
def test_what_the_table_says(more: dict[str, str], found: list[tuple[str, str, str]]) -> None:
    assert ids(run(healthy(more=more))) == found


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (TimeoutError(errno.ETIMEDOUT, "no answer"), ("FAIL", "mount-hung", "/home")),
        (fail(errno.ESTALE), ("FAIL", "mount-stale", "/home")),
        (fail(errno.EIO), ("FAIL", "mount-broken", "/home")),
        (fail(errno.ENOTCONN), ("FAIL", "mount-broken", "/home")),
        (fail(errno.EHOSTDOWN), ("FAIL", "mount-broken", "/home")),
        (fail(errno.EACCES), None),  # root_squash, and a /home of mode 0711
        (fail(errno.EKEYEXPIRED), None),  # sec=krb5, and root has no ticket
    ],
)
def test_what_a_probe_says(error: OSError, found: tuple[str, str, str] | None) -> None:
    assert ids(run(healthy(probes={"/home": error}))) == ([found] if found else [])


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
def test_a_probe_that_could_not_start_is_the_tools_trouble(code: int) -> None:
    with pytest.raises(OSError, match=os.strerror(code)):
        run(healthy(probes={"/home": fail(code)}))


def test_required_replaces_fstab() -> None:
    options = {"mounts": {"required": ["/scratch:type=lustre", "/gone", "/software:ro"]}}
    system = healthy(more=without("/home"), options=options)
    assert ids(run(system)) == [("FAIL", "mount-missing", "/gone")]


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ("/home:type=nfs", []),
        ("/home:type=lustre", [("FAIL", "mount-wrong", "/home")]),
        ("/software", [("FAIL", "mount-read-only", "/software")]),
        ("/tmp:rw", []),
        ("/etc", [("FAIL", "mount-missing", "/etc")]),  # a directory, not a mount
        ("home", [("WARN", "mount-setting", "")]),
    ],
)
def test_one_required_mount(entry: str, found: list[tuple[str, str, str]]) -> None:
    options = {"mounts": {"required": [entry]}}
    assert ids(run(healthy(options=options, probes={"/tmp": None}))) == found


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (0, []),
        (errno.EROFS, [("FAIL", "mount-read-only", "/scratch")]),
        (errno.ENOSPC, [("FAIL", "mount-broken", "/scratch")]),
        (errno.EACCES, [("WARN", "mount-setting", "/scratch")]),
    ],
)
def test_a_mount_that_must_be_written_to(code: int, found: list[tuple[str, str, str]]) -> None:
    options = {"mounts": {"required": ["/scratch:write"]}}
    error = fail(code) if code else None
    assert ids(run(healthy(options=options, probes={"/scratch": error}))) == found


def test_a_required_path_may_be_a_link_to_the_mount() -> None:
    options = {"mounts": {"required": ["/data"]}}
    assert run(healthy(options=options, links={"/data": "/scratch"})) == []


def test_a_slow_mount_that_nobody_names_is_a_warning() -> None:
    hung = {"/home": TimeoutError(errno.ETIMEDOUT, "no answer")}
    options = {"mounts": {"required": ["/scratch"]}}
    assert ids(run(healthy(probes=hung, options=options))) == [("WARN", "mount-hung", "/home")]
    more = {"/etc/fstab": ""}  # mounted by autofs or a unit; in a storm of checkpoints it is slow
    assert ids(run(healthy(probes=hung, more=more))) == [("WARN", "mount-hung", "/home")]
    stale = {"/home": OSError(errno.ESTALE, "stale file handle")}
    assert ids(run(healthy(probes=stale, more=more))) == [("FAIL", "mount-stale", "/home")]


def test_ignored_mounts_are_not_touched() -> None:
    hung = {"/home": TimeoutError(errno.ETIMEDOUT, "no answer")}
    system = healthy(probes=hung, options={"mounts": {"ignore": ["/home/"]}})
    assert run(system) == []
    assert not system.asked["probe /home"]


def test_users_own_fuse_mounts_are_not_touched() -> None:
    mine = "60 27 0:60 / /home2/u/mnt rw - fuse.sshfs u@host:/ rw,user_id=1000\n"
    system = healthy(more={"/proc/self/mountinfo": MOUNTINFO + mine})
    assert run(system) == []
    assert not system.asked["probe /home2/u/mnt"]


def test_a_file_system_is_probed_once_however_often_it_is_mounted() -> None:
    again = "61 27 0:50 /x /opt/x rw - nfs4 srv:/home rw\n"
    system = healthy(more={"/proc/self/mountinfo": MOUNTINFO + again})
    assert run(system) == []
    assert not system.asked["probe /opt/x"]


class Clock:
    """time.monotonic that each probe advances by its whole deadline."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_dead_mounts_share_one_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(mounts, "time", clock)
    system = healthy()
    waited = []

    def probe(path: str, write: bool, deadline_s: float) -> None:
        waited.append((path, deadline_s))
        clock.now += deadline_s
        raise TimeoutError(errno.ETIMEDOUT, "no answer")

    monkeypatch.setattr(system, "probe", probe)
    found = run(system)
    assert waited == [("/home", 3.0), ("/scratch", 1.5)]
    assert sum(seconds for _, seconds in waited) < mounts.CHECK.deadline_s
    assert ids(found) == [
        ("FAIL", "mount-hung", "/home"),
        ("FAIL", "mount-hung", "/scratch"),
        ("WARN", "mount-hung", ""),
    ]
    assert "/software" in found[-1].evidence


class Automount(FakeSystem):
    """A direct trigger at /auto that a probe mounts, or not."""

    mounts = True

    def probe(self, path: str, write: bool, deadline_s: float) -> None:
        super().probe(path, write, deadline_s)
        if path == "/auto" and self.mounts:
            self.files["/proc/self/mountinfo"] = TRIGGER + "71 70 0:71 / /auto rw - nfs4 s:/a rw\n"


TRIGGER = (
    "27 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
    "70 27 0:70 / /auto rw - autofs systemd-1 rw,fd=5,timeout=0,direct\n"
)


@pytest.mark.parametrize("mounts_it", [True, False])
def test_a_direct_automount_must_mount(mounts_it: bool) -> None:
    system = Automount(
        {
            "/proc/self/mountinfo": TRIGGER,
            "/etc/fstab": "s:/a /auto nfs4 noauto,x-systemd.automount 0 0\n",
        },
        probes={"/auto": None},
    )
    system.mounts = mounts_it
    assert ids(run(system)) == ([] if mounts_it else [("FAIL", "mount-missing", "/auto")])


def test_an_indirect_automount_is_there_as_it_is() -> None:
    system = FakeSystem(
        {
            "/proc/self/mountinfo": TRIGGER.replace("direct", "indirect"),
            "/etc/fstab": "",
        },
        probes={"/auto": None},
        options={"mounts": {"required": ["/auto"]}},
    )
    assert run(system) == []


def test_without_a_table_nothing_required_can_be_proved() -> None:
    with pytest.raises(FileNotFoundError):
        run(FakeSystem(options={"mounts": {"required": ["/home"]}}))
