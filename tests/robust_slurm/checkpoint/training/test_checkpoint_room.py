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
from room_files import PIECE, files, prepared, use_small_pieces
from waiting import until

from robust_slurm.checkpoint.format.advice import populate
from robust_slurm.checkpoint.store import reserve
from robust_slurm.checkpoint.store.reserve import SNAPSHOTS, Reserve, Room
from robust_slurm.checkpoint.transfer import incoming
from robust_slurm.checkpoint.transfer.incoming import Incoming
from robust_slurm.checkpoint.transfer.sending import Offer


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_pieces(monkeypatch)


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Reserve]:
    made = Reserve(tmp_path, "0")
    yield made
    made.close()


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
    prepared(room, size, 2)
    assert len(files(tmp_path)) == 2
    for path in files(tmp_path):
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
    prepared(room, PIECE, 1)
    files(tmp_path)[0].unlink()
    assert not room.take(100, tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []


def test_asked_again_it_makes_no_more(room: Reserve, tmp_path: Path) -> None:
    prepared(room, PIECE, 1)
    room.prepare(PIECE, 3)
    assert room.take(PIECE, tmp_path / "mine")
    room.prepare(PIECE, 3)
    assert files(tmp_path) == []
    room.clear()
    prepared(room, PIECE, 2)  # of another time without ranks


@pytest.mark.parametrize(
    ("count", "free", "made"),
    [(2, SNAPSHOTS * PIECE - 1, 0), (2, SNAPSHOTS * PIECE, 2), (20, 20 * PIECE - 1, 0)],
)
def test_room_is_made_only_beside_what_a_rank_will_save_and_as_much_again(
    room: Reserve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    free: int,
    made: int,
) -> None:
    monkeypatch.setattr(reserve, "free", lambda _directory: free)
    room.prepare(PIECE, count)
    worker = room._thread
    assert worker is not None
    worker.join(30)
    assert len(files(tmp_path)) == len(room.sizes) == made


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
    assert len(files(tmp_path)) == 1  # of the second nothing stays


def test_who_needs_it_does_not_wait_for_all_of_it(
    room: Reserve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = _slow(monkeypatch, pieces=5)
    room.prepare(4 * PIECE, 3)
    assert reached.wait(30)
    go_on.set()
    assert room.take(4 * PIECE, tmp_path / "mine")
    sizes = [path.stat().st_size for path in files(tmp_path)]
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
    until(lambda: not files(tmp_path), "the file that was being made is gone")
    assert room.sizes == []


# -- received into


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("size", [PIECE // 2, PIECE, 3 * PIECE])
def test_a_snapshot_is_received_into_room(
    room: Reserve, tmp_path: Path, size: int, mapped: bool
) -> None:
    prepared(room, PIECE, 1)
    inode = files(tmp_path)[0].stat().st_ino
    (tmp_path / "copy").write_bytes(b"an older one")
    taken = Incoming(tmp_path / "copy", _offer(size), mapped=mapped, room=room)
    info = (tmp_path / "copy").stat()
    assert info.st_ino == taken.inode == inode
    assert info.st_size == size
    assert (tmp_path / "copy").read_bytes()[:8] == bytes(8)
    assert files(tmp_path) == []
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
    prepared(room, pages * mmap.PAGESIZE, 1)
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
    prepared(room, 2 * PIECE, 1)
    if happened is not None:
        happened(files(in_memory)[0])
    taken = Incoming(in_memory / "copy", _offer(size), mapped=False, room=room)
    assert (taken._map is not None) == used
    assert (in_memory / "copy").stat().st_size == size
    taken.close()
    assert taken._map is None
    room.close()


def test_few_of_many_files_are_mapped(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "_MAPPED", 2)
    room = Reserve(in_memory, "0")
    prepared(room, PIECE, 5)
    taken = [room.take(PIECE, in_memory / "mine") for _ in range(5)]
    assert [each is not None and each.mapped is not None for each in taken].count(True) == 2
    room.close()


def test_where_the_kernel_cannot_map_ahead_room_is_written_to(
    room: Reserve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reserve, "populate", lambda *_: False)
    prepared(room, PIECE, 1)
    taken = Incoming(tmp_path / "copy", _offer(PIECE), mapped=False, room=room)
    assert taken._map is None
    assert (tmp_path / "copy").stat().st_blocks * 512 >= PIECE
    taken.close()


def test_room_that_is_of_no_use_is_given_up_where_space_is_short(
    room: Reserve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(room, PIECE, 3)
    free = os.statvfs(tmp_path)

    class Full:
        """Free space only in the other room files."""

        f_frsize = free.f_frsize

        @property
        def f_bavail(self) -> int:
            return (2 - len(files(tmp_path))) * PIECE // self.f_frsize

    monkeypatch.setattr(incoming.os, "fstatvfs", lambda _fd: Full())
    Incoming(tmp_path / "copy", _offer(3 * PIECE), mapped=False, room=room).close()
    assert room.sizes == []
    assert not files(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        Incoming(tmp_path / "other", _offer(3 * PIECE), mapped=False, room=room)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
