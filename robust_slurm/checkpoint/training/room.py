"""Room for a rank's snapshots: estimated at start, fewer of them where it is short, or a disk."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..copying import gpu
from ..copying.slots import OWN, Ring
from ..format.layout import SUFFIX, Snapshot
from ..format.sizes import exceeds, megabytes
from ..store.reserve import free
from .client import Client
from .options import Options

MARGIN = 1 << 20  # bytes that header, generators and loader take, besides 1/32 of the estimate
_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)


def is_full(error: OSError) -> bool:
    """Return whether memory or a disk has no room left."""
    return error.errno in _FULL


def estimate(models: Iterable[torch.nn.Module], optimizers: Iterable[Any]) -> int:
    """Bytes of one snapshot of this rank's parameters, buffers and optimizer state.

    The state that an optimizer has not made yet is counted as Adam's or SGD's would be.
    """
    size = 0
    known: set[int] = set()
    for model in models:
        if isinstance(model, torch.nn.Module):
            tensors = [*model.parameters(), *model.buffers()]
            size, known = size + sum(map(_bytes, tensors)), known | set(map(id, tensors))
    for optimizer in optimizers:
        for group in getattr(optimizer, "param_groups", ()):
            size += sum(_bytes(p) for p in group["params"] if known and id(p) not in known)
            copies = (2 if "betas" in group else 0) + bool(group.get("momentum"))
            copies += bool(group.get("amsgrad"))
            size += copies * sum(map(_bytes, group["params"]))
    return size


def _bytes(tensor: torch.Tensor) -> int:
    local = getattr(tensor, "to_local", None)  # of a DTensor: this rank's shard
    return (tensor if local is None else local()).nbytes


class RoomRung(NamedTuple):
    """Numbers of snapshots that a node keeps of each rank."""

    own: int
    extra: int
    """One more of its own while one is written to disk."""
    replicas: int
    """Replicas of another rank."""

    @property
    def files(self) -> int:
        return sum(self)

    def __str__(self) -> str:
        return f"{self.own + self.extra} own and {self.replicas} replicas"


LADDER = (
    RoomRung(3, 1, 3),
    RoomRung(2, 0, 2),
    RoomRung(2, 0, 0),
    RoomRung(1, 0, 0),
)
ALONE = (
    RoomRung(1, 1, 0),
    RoomRung(1, 0, 0),
)  # outside robust-srun only what goes to disk is saved
_COSTS = {
    2: "each step waits until all ranks have the one before, and steps are left out while one is "
    "written to disk",
    0: "no node keeps replicas here, so a lost node costs the steps since the last durable one",
    1: "a fault while it is overwritten costs them as well, so not every step is saved",
}


def choose(
    room: int, size: int, ranks: int, ladder: Sequence[RoomRung], below: RoomRung | None = None
) -> tuple[RoomRung | None, str]:
    """Return the first rung for which ``room`` bytes of a node suffice, and what to tell people (""
    for the first of all). ``size``: bytes of a snapshot of each of the node's ``ranks``. ``below``:
    a rung for which there was no room after all, so only lower ones count. Pure."""
    needs = [rung.files * size * ranks for rung in ladder]
    first = 0 if below is None else ladder.index(below) + 1
    fit = [rung for rung, need in zip(ladder, needs, strict=True) if need <= room]
    rung = next((rung for rung in fit if rung in ladder[first:]), None)
    if rung is ladder[0]:
        return rung, ""
    head = (
        f"snapshots of about {megabytes(size)} each: {ladder[0].files} for each of the "
        f"{ranks} rank{'s' * (ranks != 1)} of this node take {megabytes(needs[0])} of /dev/shm (a "
        f"tmpfs), {megabytes(room)} are free"
    )
    if rung is None:
        return None, head
    kept = f"{head}. Kept: {rung}"
    if ladder is not LADDER:
        return rung, f"{kept}; steps are left out while one is written"
    costs = [_COSTS[rung.replicas]] + ([_COSTS[1]] if rung.own == 1 else [])
    return rung, f"{kept}: {'; '.join(costs)}. Make /dev/shm or the job's --mem larger"


def check_room(
    directory: str, size: int, below: RoomRung | None = None, *, local_ranks: int, replicas: bool
) -> tuple[RoomRung | None, str]:
    """Choose by the room in ``directory``, in which existing snapshots count as room too."""
    room = free(directory)
    for file in Path(directory).glob(f"*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # another slot's store has just removed it
            room += file.lstat().st_blocks * 512
    return choose(room, size, local_ranks, LADDER if replicas else ALONE, below)


class SnapshotRoom:
    """The slots of a rank's snapshots. Belongs to the training thread."""

    def __init__(
        self,
        client: Client,
        about: Snapshot,
        options: Options,
        *,
        patient: bool,
        say: Callable[[str], None],
        expected: int,
        choose: Callable[[int, RoomRung | None], tuple[RoomRung | None, str]],
    ) -> None:
        """``patient``: under robust-srun. ``expected``: bytes of a snapshot by estimate;
        ``choose``: see ``check_room``, for a size and a rung."""
        self._client, self._about, self._options = client, about, options
        self._patient, self._say = patient, say
        self._expected, self._choose = expected, choose
        self._rung: RoomRung | None = None
        self._above: RoomRung | None = None  # the last one for which there was no room after all
        self._fewer = ""  # to tell the user when a snapshot has found room again
        own = {int(each["slot"]): int(each["step"]) for each in client.welcome.get("own", ())}
        self.ring: Ring | None = Ring(
            Path(client.welcome["directory"]), about.rank, own, own=OWN if patient else 1
        )
        """None: there is no room at all, and nothing is saved."""
        self.on_disk = False
        """True if the slots lie on a disk, where only steps for the durable tier pass through."""

    def keep(self, rung: RoomRung) -> None:
        """Use no more memory than this from now on; the store is told what it may use."""
        if self.ring is None or self.on_disk:
            return
        self._rung = rung
        self.ring.limit(rung.own, rung.extra)
        self._client.waits_for_all = self._patient and rung.own == 2
        self._client.say("slots", replicas=rung.replicas)

    def fit(self, size: int) -> None:
        """Choose anew for the real size: the estimate leaves out loader and extra."""
        if self.on_disk or not exceeds(size, self._expected):
            return
        self._expected = size
        rung, text = self._choose(size, self._above)
        if rung is None:
            self.leave_memory(text)
        else:
            self.keep(rung)
        if rung is not None and text:
            self._say(text)

    def reserve(self) -> None:
        """Make the first slot ready if CUDA has to register its memory, which would hold up the
        first save(). A failure here is ignored: the first save() meets it again and handles it."""
        if self.ring is None or self.on_disk or gpu.current() is None:
            return
        with contextlib.suppress(Exception):
            self.ring.reserve(self._expected + self._expected // 32 + MARGIN, self._client.held())

    def use_less(self, error: OSError, size: int) -> None:
        """Go down a rung, as a snapshot found no room; from the last rung, go to a disk."""
        where = self.ring.directory if self.ring is not None else ""
        why = f"a snapshot of {megabytes(size)} finds no room in {where} ({error.strerror})"
        self._above = self._rung
        rung, text = self._choose(size, self._above)
        if rung is None or self.on_disk:
            self._fewer = ""
            self.leave_memory(why)
        else:
            self._fewer = f"{why}: {text}"
            self.keep(rung)

    def found(self) -> None:
        """A snapshot has found room; tell the user if that is with fewer slots than before."""
        if self._fewer:
            self._say(self._fewer)
            self._fewer = ""

    def leave_memory(self, why: str) -> None:
        """Stop using memory for want of room: durable steps go by way of a disk, if there is one.

        ``why``: what found no room, and where.
        """
        ring, self.ring = self.ring, None
        if ring is None:
            return
        if self.on_disk:
            self._say(f"{why}: this rank's state is NOT saved. Training continues")
            return
        ring.remove()
        self.ring, how = _by_disk(self._options, self._about)
        self.on_disk = self.ring is not None
        self._say(
            f"{why}: no snapshots in memory, so a restart begins at the last durable step. {how}. "
            f"Make {_holds(ring)} larger, or save less; training continues"
        )

    def close(self) -> None:
        """Release the slots; in memory, the files stay for the store."""
        if self.ring is None:
            return
        if self.on_disk:
            self.ring.remove()
        else:
            self.ring.release()


def _by_disk(options: Options, about: Snapshot) -> tuple[Ring | None, str]:
    """Slots on a disk, by way of which durable steps can go on, and what to tell people."""
    staging = _staging(options, about)
    if staging is None:
        return None, "There are no durable ones either"
    try:
        staging.mkdir(parents=True, exist_ok=True, mode=0o700)
        ring = Ring(staging, about.rank, {}, own=1)
    except OSError as error:
        return None, f"There are no durable ones either ({error})"
    return ring, f"Durable checkpoints go on by way of {staging}"


def _staging(options: Options, about: Snapshot) -> Path | None:
    if options.directory:
        return Path(options.directory) / ".staging"
    return None


def _holds(ring: Ring) -> str:
    """Name the memory or disk that holds the ring's files, in terms that a user can change."""
    is_shm = ring.directory.is_relative_to("/dev/shm")
    return "/dev/shm (a tmpfs) or the job's --mem" if is_shm else f"the disk of {ring.directory}"
