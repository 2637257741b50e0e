"""torch's flight recorders of the ranks below a slot, as the ranks give them as JSON.

``robust_slurm.auto.flights`` is the rank's side. A rank that does not answer in time has none.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import time
from collections.abc import Collection
from pathlib import Path

import msgspec

from robust_slurm.frames.json_lines import peer
from robust_slurm.text import one_line
from srun_wrapper.locate.recorded import Recorded, RecordedCall, RecordedGroup

ANSWER = 1.0  # s for all ranks of a slot
LONGEST = 16 << 20  # bytes of an answer that are read: 2,000 collectives are about 1 MB
BYTES = 4 << 10  # of a rank's collectives as they are sent on
RANKS = 256  # of a node
GROUPS = 32  # of a rank
UNFINISHED = 6  # collectives of a group, the first ones
BEFORE = 3  # collectives of a group before those
WORD = 48  # characters


class _Entry(msgspec.Struct, gc=False):
    """One entry of torch's FlightRecorder::dump_json, as far as it is of use."""

    process_group: tuple[str, str] = ("", "")
    collective_seq_id: int = -1
    profiling_name: str = ""
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    state: str = ""
    retired: bool = False
    is_p2p: bool = False
    time_created_ns: int = 0


class _Dump(msgspec.Struct):
    entries: list[_Entry] = []


class _Head(msgspec.Struct):
    rank: int
    now: int
    since: int = 0
    groups: dict[str, int] = {}  # the members of each, as a number


_decode_head = msgspec.json.Decoder(_Head).decode
_decode_dump = msgspec.json.Decoder(_Dump).decode


def parse(answer: bytes) -> Recorded | None:
    """Return a rank's collectives; None if this is no answer of a rank."""
    head, _, rest = answer.partition(b"\n")
    dumps = rest.splitlines()
    try:
        rank = _decode_head(head)
        entries = [e for dump in dumps if dump.strip() for e in _decode_dump(dump).entries]
    except (ValueError, RecursionError):
        return None
    if rank.rank < 0:
        return None
    groups: dict[tuple[str, str, str], dict[int, _Entry]] = {}
    for entry in entries:  # the oldest first
        if entry.time_created_ns < rank.since:
            continue  # of an epoch that is over
        if not entry.is_p2p and entry.collective_seq_id >= 0:
            name, description = entry.process_group
            backend = entry.profiling_name.partition(":")[0]
            calls = groups.setdefault((name, backend, description), {})
            if entry.collective_seq_id <= 1 and any(number > 1 for number in calls):
                calls.clear()  # the group was destroyed, and made anew under the same name
            calls.setdefault(entry.collective_seq_id, entry)  # parts of one coalesced call: one
    found = [
        _group(*key, rank.groups.get(key[0], 0), calls, rank.now) for key, calls in groups.items()
    ]
    found.sort(key=lambda group: not any(call.waited >= 0 for call in group.calls))
    return _bounded(Recorded(rank.rank, tuple(found[:GROUPS])))


def _group(
    name: str, backend: str, description: str, members: int, calls: dict[int, _Entry], now: int
) -> RecordedGroup:
    numbers = sorted(calls)
    unfinished = [n for n in numbers if not _done(calls[n])]
    first = unfinished[0] if unfinished else math.inf
    before = [n for n in numbers if n < first][-BEFORE:]
    shown = before + unfinished[:UNFINISHED]
    return RecordedGroup(
        one_line(name, WORD),
        one_line(backend, WORD),
        one_line(description, WORD),
        numbers[-1],
        tuple(_call(calls[number], now) for number in shown),
        members,
    )


def _done(entry: _Entry) -> bool:
    return entry.retired or entry.state == "completed"


def _call(entry: _Entry, now: int) -> RecordedCall:
    waited = -1.0 if _done(entry) else max(0.0, (now - entry.time_created_ns) / 1e9)
    sizes = " + ".join("x".join(map(str, size)) or "1" for size in entry.input_sizes[:3])
    if len(entry.input_sizes) > 3:
        sizes += f" + {len(entry.input_sizes) - 3} more"
    items = sum(math.prod(size) for size in entry.input_sizes)
    return RecordedCall(
        entry.collective_seq_id,
        one_line(entry.profiling_name, WORD),
        min(items, (1 << 63) - 1),
        one_line(sizes, WORD) or "nothing",
        one_line(entry.input_dtypes[0], WORD) if entry.input_dtypes else "no data",
        round(waited, 2),
    )


def _bounded(recorded: Recorded) -> Recorded:
    """Leave out the last groups as far as it is too long; those with unfinished calls are first."""
    groups = recorded.groups
    while groups and len(msgspec.msgpack.encode(Recorded(recorded.rank, groups))) > BYTES:
        groups = groups[:-1]
    return Recorded(recorded.rank, groups)


def read_all(
    directory: Path, epoch: int, ours: Collection[int], seconds: float = ANSWER
) -> tuple[Recorded, ...]:
    """Ask all ranks among these processes at once. Those that do not answer are left out."""
    until = time.monotonic() + seconds
    texts: dict[socket.socket, bytearray] = {}
    found: list[Recorded] = []
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for path in sorted(directory.glob(f"{epoch}-*.calls"))[:RANKS]:
            line = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            line.setblocking(False)
            try:
                line.connect(str(path))
                pid, _ = peer(line)
            except OSError:  # its rank is gone
                continue
            if pid in ours:
                selector.register(line, selectors.EVENT_READ)
                texts[line] = bytearray()
        while selector.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                line = key.fileobj  # type: ignore[assignment]
                try:
                    piece = line.recv(1 << 18)
                except BlockingIOError:
                    continue
                except OSError:
                    piece = b""
                texts[line] += piece
                if piece and len(texts[line]) <= LONGEST:
                    continue
                selector.unregister(line)
                text = bytes(texts.pop(line))
                if not piece and text and (one := parse(text)) is not None:
                    found.append(one)
    return tuple(found)
