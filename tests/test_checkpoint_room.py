"""Memory made ready for snapshots that may have to be fetched, and what becomes of it."""

from __future__ import annotations

import mmap
import os
import resource
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from robust_slurm.checkpoint import digest, incoming, layout, reserve
from robust_slurm.checkpoint.advice import populate
from robust_slurm.checkpoint.events import Restore, Wanted
from robust_slurm.checkpoint.incoming import Incoming
from robust_slurm.checkpoint.reserve import SNAPSHOTS, Reserve, Room
from robust_slurm.checkpoint.shelf import TORN, Record, Shelf, open_snapshot
from robust_slurm.checkpoint.store import Store
from robust_slurm.checkpoint.transfer import Offer
from srun_wrapper.checkpoint_messages import MakeRoom
from srun_wrapper.keeper import Keeper
from srun_wrapper.loop import Loop
from srun_wrapper.messages import Start
from tests.checkpoint_stores import FakeRank, stores, write_snapshot
from tests.waiting import until

PIECE = 1 << 16


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "_PIECE", PIECE)
    monkeypatch.setattr(digest, "CHUNK", 1 << 18)


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Reserve]:
    made = Reserve(tmp_path, "0")
    yield made
    made.close()


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob(".room-*"))


def _prepared(room: Reserve, size: int, files: int) -> None:
    room.prepare(size, files)
    until(lambda: room.sizes == [size] * files, f"{files} files of {size} bytes")


def _offer(size: int, owner: int = 3) -> Offer:
    return Offer(owner, 7, 4, (owner,), 0, size, [])


def _slow(monkeypatch: pytest.MonkeyPatch, pieces: int) -> tuple[threading.Event, threading.Event]:
    """The kernel takes its time from this piece on: set when it has come so far, to be set."""
    reached, go_on = threading.Event(), threading.Event()
    done = []
    real = os.posix_fallocate

    def fallocate(fd: int, at: int, count: int) -> None:
        done.append(at)
        if len(done) > pieces:
            reached.set()
            go_on.wait(30)
        real(fd, at, count)

    monkeypatch.setattr("os.posix_fallocate", fallocate)
    return reached, go_on


# -- the files


def test_room_is_memory_that_is_there_and_torn(room: Reserve, tmp_path: Path) -> None:
    size = 5 * PIECE + 100
    _prepared(room, size, 2)
    assert len(_files(tmp_path)) == 2
    for path in _files(tmp_path):
        info = path.stat()
        assert info.st_size == size <= info.st_blocks * 512
        assert info.st_mode & 0o777 == 0o600
        assert path.read_bytes()[:8] == bytes(8)


@pytest.mark.parametrize(
    ("sizes", "wanted", "taken"),
    [
        ((100_000, 300_000, 200_000), 150_000, 200_000),  # the smallest that is large enough
        ((100_000, 300_000, 200_000), 200_000, 200_000),
        ((100_000, 300_000, 200_000), 900_000, 300_000),  # the least is missing
    ],
)
def test_the_file_that_fits_best_is_taken(
    tmp_path: Path, sizes: tuple[int, ...], wanted: int, taken: int
) -> None:
    room = Reserve(tmp_path, "0")
    for number, size in enumerate(sizes):
        path = tmp_path / f"made-{number}"
        path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            inode = path.stat().st_ino
            room._files[path] = Room(size, inode, mmap.mmap(file.fileno(), size))
    found = room.take(wanted, tmp_path / "mine")
    assert found is not None
    assert found.size == taken
    assert found.mapped is not None
    assert len(found.mapped) == taken
    assert (tmp_path / "mine").stat().st_size == taken
    assert room.sizes == sorted(set(sizes) - {taken})
    room.close()
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_no_room_none_prepared_or_removed_by_somebody(room: Reserve, tmp_path: Path) -> None:
    assert not room.take(100, tmp_path / "mine")
    _prepared(room, PIECE, 1)
    _files(tmp_path)[0].unlink()
    assert not room.take(100, tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []


def test_asked_again_it_makes_no_more(room: Reserve, tmp_path: Path) -> None:
    _prepared(room, PIECE, 1)
    room.prepare(PIECE, 3)
    assert room.take(PIECE, tmp_path / "mine")
    room.prepare(PIECE, 3)
    assert _files(tmp_path) == []
    room.clear()
    _prepared(room, PIECE, 2)  # of another time without ranks


@pytest.mark.parametrize(
    ("files", "free", "made"),
    [(2, SNAPSHOTS * PIECE - 1, 0), (2, SNAPSHOTS * PIECE, 2), (20, 20 * PIECE - 1, 0)],
)
def test_room_is_made_only_beside_what_a_rank_will_save_and_as_much_again(
    room: Reserve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: int,
    free: int,
    made: int,
) -> None:
    monkeypatch.setattr(reserve, "free", lambda _directory: free)
    room.prepare(PIECE, files)
    worker = room._thread
    assert worker is not None
    worker.join(30)
    assert len(_files(tmp_path)) == len(room.sizes) == made


def test_a_full_memory_is_no_error(
    room: Reserve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [3 * PIECE]
    real = os.posix_fallocate

    def fallocate(fd: int, at: int, count: int) -> None:
        left[0] -= count
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        real(fd, at, count)

    monkeypatch.setattr("os.posix_fallocate", fallocate)
    room.prepare(2 * PIECE, 5)
    worker = room._thread
    assert worker is not None
    worker.join(30)
    assert room.sizes == [2 * PIECE]
    assert len(_files(tmp_path)) == 1  # of the second nothing stays


def test_who_needs_it_does_not_wait_for_all_of_it(
    room: Reserve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = _slow(monkeypatch, pieces=5)
    room.prepare(4 * PIECE, 3)
    assert reached.wait(30)
    go_on.set()
    assert room.take(4 * PIECE, tmp_path / "mine")
    sizes = [path.stat().st_size for path in _files(tmp_path)]
    assert sizes == room.sizes
    assert sum(sizes) < 8 * PIECE  # it was left at what there was


def test_what_is_given_up_while_the_kernel_hangs_goes_when_it_returns(
    room: Reserve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reserve, "_PATIENCE", 0.05)
    reached, go_on = _slow(monkeypatch, pieces=1)
    room.prepare(4 * PIECE, 2)
    assert reached.wait(30)
    room.clear()
    go_on.set()
    until(lambda: not _files(tmp_path), "the file that was being made is gone")
    assert room.sizes == []


# -- received into


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("size", [PIECE // 2, PIECE, 3 * PIECE])
def test_a_snapshot_is_received_into_room(
    room: Reserve, tmp_path: Path, size: int, mapped: bool
) -> None:
    _prepared(room, PIECE, 1)
    inode = _files(tmp_path)[0].stat().st_ino
    (tmp_path / "copy").write_bytes(b"an older one")
    taken = Incoming(tmp_path / "copy", _offer(size), mapped=mapped, room=room)
    info = (tmp_path / "copy").stat()
    assert info.st_ino == taken.inode == inode
    assert info.st_size == size
    assert (tmp_path / "copy").read_bytes()[:8] == bytes(8)
    assert _files(tmp_path) == []
    taken.close()


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory where stores have theirs, on a kernel that can map ahead (Linux 5.14)."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        if not populate(page, 0, mmap.PAGESIZE):
            pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def test_room_costs_no_faults_when_it_is_used(in_memory: Path) -> None:
    pages = 256
    room = Reserve(in_memory, "0")
    _prepared(room, pages * mmap.PAGESIZE, 1)
    taken = room.take(pages * mmap.PAGESIZE, in_memory / "mine")
    room.close()
    assert taken is not None
    assert taken.mapped is not None
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for page in range(pages):
        taken.mapped[page * mmap.PAGESIZE] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < pages // 4


def _cut(path: Path) -> None:
    os.truncate(path, 0)


def _replace(path: Path) -> None:
    path.unlink()
    path.write_bytes(bytes(2 * PIECE))


@pytest.mark.parametrize(
    ("size", "happened", "used"),
    [
        (PIECE, None, True),
        (2 * PIECE, None, True),
        (2 * PIECE + 1, None, False),
        (PIECE, _cut, False),
        (PIECE, _replace, False),
    ],
)
def test_what_is_mapped_is_used_if_it_is_this_file_and_all_there(
    in_memory: Path, size: int, happened: Callable[[Path], None] | None, used: bool
) -> None:
    room = Reserve(in_memory, "0")
    _prepared(room, 2 * PIECE, 1)
    if happened is not None:
        happened(_files(in_memory)[0])
    taken = Incoming(in_memory / "copy", _offer(size), mapped=False, room=room)
    assert (taken._map is not None) == used
    assert (in_memory / "copy").stat().st_size == size
    taken.close()
    assert taken._map is None
    room.close()


def test_few_of_many_files_are_mapped(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "_MAPPED", 2)
    room = Reserve(in_memory, "0")
    _prepared(room, PIECE, 5)
    taken = [room.take(PIECE, in_memory / "mine") for _ in range(5)]
    assert [each is not None and each.mapped is not None for each in taken].count(True) == 2
    room.close()


def test_where_the_kernel_cannot_map_ahead_room_is_written_to(
    room: Reserve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reserve, "populate", lambda *_: False)
    _prepared(room, PIECE, 1)
    taken = Incoming(tmp_path / "copy", _offer(PIECE), mapped=False, room=room)
    assert taken._map is None
    assert (tmp_path / "copy").stat().st_blocks * 512 >= PIECE
    taken.close()


def test_room_that_is_of_no_use_is_given_up_where_space_is_short(
    room: Reserve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _prepared(room, PIECE, 3)
    free = os.statvfs(tmp_path)

    class Full:
        """All that is free is what the other room files have."""

        f_frsize = free.f_frsize

        @property
        def f_bavail(self) -> int:
            return (2 - len(_files(tmp_path))) * PIECE // self.f_frsize

    monkeypatch.setattr(incoming.os, "fstatvfs", lambda _fd: Full())
    Incoming(tmp_path / "copy", _offer(3 * PIECE), mapped=False, room=room).close()
    assert room.sizes == []
    assert not _files(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        Incoming(tmp_path / "other", _offer(3 * PIECE), mapped=False, room=room)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


# -- of a store


def _fetch(store: Store, source: Store, owner: int, step: int) -> str:
    (outcome,) = store.fetch([Wanted(owner, step, "127.0.0.1", source.port)])
    assert outcome.ok, outcome.why
    return outcome.file


def test_a_fetch_uses_the_room_and_the_ranks_get_what_is_left(tmp_path: Path) -> None:
    with stores(tmp_path, 2) as [(a, _), (spare, _)]:
        rank = FakeRank(a, 0)
        data = rank.save(1)
        rank.wait("kept", step=1)
        _prepared(spare.room, len(data) + PIECE, 2)
        directory = spare.socket_path.parent
        inodes = {path.stat().st_ino for path in _files(directory)}
        assert spare.stock() == []
        file = _fetch(spare, a, 0, 1)
        assert (directory / file).read_bytes() == data
        assert (directory / file).stat().st_ino in inodes
        assert len(_files(directory)) == 1
        assert [(h.tier, h.owner, h.step, h.ok) for h in spare.stock()] == [("memory", 0, 1, True)]
        spare.begin(1, Restore(1, "memory", {0: file}))
        assert _files(directory) == []
        assert (directory / file).read_bytes() == data


@pytest.mark.parametrize("change", ["same", "torn", "another step", "another rank", "cut"])
def test_a_file_that_was_known_is_looked_at_again(tmp_path: Path, change: str) -> None:
    path = tmp_path / "own-0-1.safetensors"
    write_snapshot(path, 0, 7)
    fd, size, inode = open_snapshot(path)
    record = Record(
        path.name, step=7, world=4, needs=(0,), epoch=0, size=size, inode=inode, digest=[]
    )
    with open(fd, "rb", buffering=0):
        shelf = Shelf(tmp_path)
        assert shelf.overwritten(fd, record) == ""
        if change == "cut":
            os.truncate(path, 100)
        elif change == "torn":
            with path.open("r+b") as file:
                file.write(bytes(8))
        else:
            write_snapshot(path, int(change == "another rank"), 7 + (change == "another step"))
        expected = {"same": "", "torn": TORN, "another step": "overwritten by step 8",
                    "another rank": "of rank 1", "cut": ""}  # fmt: skip
        for _ in range(2):
            said = shelf.overwritten(fd, record)
            assert (expected[change] in said) and bool(said) == (change != "same")


def test_a_header_that_is_known_is_not_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for before each piece that is sent, and takes as long as that does."""
    path = tmp_path / "own-0-1.safetensors"
    write_snapshot(path, 0, 7)
    fd, size, inode = open_snapshot(path)
    record = Record(
        path.name, step=7, world=4, needs=(0,), epoch=0, size=size, inode=inode, digest=[]
    )
    read = []
    parse = layout.parse_header
    monkeypatch.setattr(layout, "parse_header", lambda *a: read.append(1) or parse(*a))
    with open(fd, "rb", buffering=0):
        for _ in range(3):
            assert Shelf(tmp_path).overwritten(fd, record) == ""
    assert len(read) == 1


def test_a_fetch_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with stores(tmp_path, 2, patience=0.3) as [(a, _), (spare, _)]:
        _prepared(spare.room, PIECE, 1)
        (outcome,) = spare.fetch([Wanted(0, 1, "127.0.0.1", a.port)])
        assert not outcome.ok
        assert spare.stock() == []
        assert spare.room.sizes == [PIECE]


def test_a_store_that_ends_gives_its_room_back_and_no_other_stores(tmp_path: Path) -> None:
    kept: list[object] = []
    one = Store(tmp_path / "ckpt", name="0", key=b"k" * 32, emit=kept.append)
    other = Store(tmp_path / "ckpt", name="1", key=b"k" * 32, emit=kept.append)
    _prepared(one.room, PIECE, 2)
    _prepared(other.room, PIECE, 1)
    one.close()
    assert len(_files(tmp_path / "ckpt")) == 1
    one.room.prepare(PIECE, 1)  # an order that came late
    other.begin(1, None)
    assert _files(tmp_path / "ckpt") == []
    other.close()
    assert not (tmp_path / "ckpt").exists()


def test_the_supervisors_order_makes_room_in_every_slot_until_the_ranks_come(
    tmp_path: Path,
) -> None:
    loop = Loop()
    keepers = [
        Keeper(
            loop, local, tmp_path, b"k" * 32, lambda _message: None,
            bandwidth=0.0, local_directory="",
        )
        for local in (0, 1)
    ]  # fmt: skip
    directory = tmp_path / "ckpt"
    try:
        for keeper in keepers:
            keeper.handle(MakeRoom(PIECE, 2))
        until(lambda: [p.stat().st_size for p in _files(directory)] == [PIECE] * 4, "the room")
        for keeper in keepers:
            keeper.begin(Start(1, {}, (), 0.0, 0, True, 1, "n0", 7000))
        assert _files(directory) == []
    finally:
        for keeper in keepers:
            keeper.close()


def test_room_of_a_store_that_was_killed_is_no_snapshot(tmp_path: Path) -> None:
    directory = tmp_path / "ckpt"
    directory.mkdir()
    left = directory / ".room-0-0.safetensors"
    left.write_bytes(bytes(3 * PIECE))
    store = Store(directory, name="0", key=b"k" * 32, emit=lambda _event: None)
    FakeRank(store, 0).wait("welcome")
    assert store.stock() == []
    _prepared(store.room, PIECE, 1)
    store.close()
    assert not directory.exists()
