"""Steps that outlive their data process: whole ones, in their order, and of the same plan alone."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from robust_slurm.data.service import kept_steps, pages
from robust_slurm.data.service.kept_steps import KeptSteps
from robust_slurm.data.service.made_step import MadeStep
from robust_slurm.data.service.ring import StepRing

made: set[int] = set()
"""The memory files of all steps."""


def inode(fd: int | str) -> int:
    try:
        return os.fstat(int(fd)).st_ino
    except OSError:  # another thread's, or the listing's own
        return 0


@pytest.fixture
def pair() -> Iterator[tuple[int, int]]:
    """Sockets as robust-task holds them: the data processes get duplicates, which end with them."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.clear()
    yield ends[0].fileno(), ends[1].fileno()
    assert made and not made & {inode(fd) for fd in os.listdir("/proc/self/fd")}  # noqa: PTH208
    for end in ends:
        end.close()


def life(pair: tuple[int, int], plan: str = "it", **more: int) -> StepRing:
    ring = StepRing(kept=KeptSteps([os.dup(fd) for fd in pair]), **more)
    ring.expect(plan)
    return ring


def die(ring: StepRing) -> None:
    """Close all that a process has open."""
    for end in ring._kept._ends:
        end.close()
    for each in ring._made:
        each.close()


def step(number: int, shares: int = 2) -> MadeStep:
    rows = {share: pages.write({"x": [10 * number + share]}) for share in range(shares)}
    made.update(inode(page.fd) for page in rows.values())
    return MadeStep(str(number), number, rows, f'{{"step": {number}}}', str(number + 1))


def here(ring: StepRing) -> list[int]:
    """The steps that a rank can have, after a look into each."""
    found = []
    for each in ring._made:
        for share, page in each.pages.items():
            rows = pages.read(os.dup(page.fd), page.head())
            assert rows["x"].tolist() == [10 * each.number + share]
        assert each.state == f'{{"step": {each.number}}}' and each.after == str(each.number + 1)
        found.append(each.number)
    return found


def test_the_next_process_has_the_steps_of_the_one_before(pair: tuple[int, int]) -> None:
    ring = life(pair, ahead=4, small=4, back=4)
    for number in range(12):
        ring.add(step(number))
        ring.serve(str(number - 3))
    held = here(ring)
    assert held == [4, 5, 6, 7, 8, 9, 10, 11]
    die(ring)
    for _ in range(2):
        ring = life(pair, ahead=4, small=4, back=4)
        assert ring.inherited and here(ring) == held and not ring.wants_more()
        assert ring.level().ahead == 8  # a rank may want the first of them, nobody knows
        die(ring)
    ring = life(pair, ahead=4, small=4, back=4)
    ring.serve("11")
    ring.add(step(12))
    ring.clear("11")  # a rank has gone back, and another plan of steps follows
    die(ring)
    ring = life(pair)
    assert here(ring) == [8, 9, 10]
    ring.add(step(40))  # of another place
    die(ring)
    ring = life(pair)
    assert here(ring) == [40]
    die(ring)
    ring = life(pair, "another plan")
    assert ring.inherited and here(ring) == []
    ring.add(step(1))
    die(ring)
    ring = life(pair, "another plan")
    assert here(ring) == [1]
    die(ring)


def test_what_cannot_be_kept_is_no_error(
    pair: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = life(pair, "")  # its identity could not be had
    ring.add(step(0))
    die(ring)
    ring = life(pair)
    assert not ring.inherited
    monkeypatch.setattr(kept_steps, "MOST_FDS", 7)  # two steps of two shares
    for number in range(3):
        ring.add(step(number))
    ring.add(step(3, shares=7))
    assert here(ring) == [0, 1, 2, 3]
    die(ring)
    ring = life(pair)
    assert here(ring) == [1, 2]
    monkeypatch.setattr(socket, "send_fds", lambda *_: (_ for _ in ()).throw(OSError("too many")))
    ring.add(step(3))
    assert here(ring) == [1, 2, 3]
    die(ring)
    socket.socket(fileno=os.dup(pair[0])).send(b"x")  # none of ours
    ring = life(pair)
    assert not ring.inherited
    die(ring)
