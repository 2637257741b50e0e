"""The beat record: what lies where in the 256 bytes that a rank shares with its shim.

Little endian, six sections; the header, beat, phase and nan begin a cache line each:

====== ======= =======================================================================
offset section fields
====== ======= =======================================================================
0      header  magic 8s, version u16, size u16, epoch i32, local rank i32, rank i32,
               pid i32 (0: nobody has claimed the record yet)
64     beat    head u64, step i64, time f64, loss f64, grad norm f64, source u64, tail u64
120    sound   i64
128    phase   head u64, since f64, depth u32, name length u32, name 32s, tail u64
192    nan     head u64, step i64, proven i64, loss f64, tail u64
232    proven  head u64, step i64, tail u64
====== ======= =======================================================================

``head`` and ``tail`` of a section hold the same count (of beats, of phase changes); a writer
fills a section with one ``struct.pack_into``, in order, so a half-written section shows unequal
counts. The nan section tells of the first of those losses that were not finite since the last
finite one; it is zero while there is none. The sound section belongs to it: while the nan section
is filled, 1 + the step of the beat before that loss if its own loss was finite (0: unknown); once
a loss is finite again, HEALED. The proven section holds the newest saved step that a finite loss
was computed from, as of the last ``Checkpointer.save``; it is zero where no loss is told, and in
records of older versions. Times are seconds of CLOCK_MONOTONIC, which all processes of a node
share.

Imported in the training process: standard library only, no ``typing`` (its import alone costs
more than all the rest), and syntax that Python 3.9 understands.
"""

from __future__ import annotations

import os
from struct import Struct, error, unpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mmap import mmap

MAGIC = b"RBSTBEAT"
VERSION = 1
SIZE = 256

HEADER_AT, BEAT_AT, SOUND_AT, PHASE_AT, NAN_AT, PROVEN_AT = 0, 64, 120, 128, 192, 232
HEADER = Struct("<8sHHiiii")
BEAT = Struct("<QqdddQQ")
SOUND = Struct("<q")
PHASE = Struct("<QdII32sQ")
NAN = Struct("<QqqdQ")
PROVEN = Struct("<QqQ")
RECORD = Struct("<8sHHiiii36xQqdddQQqQdII32sQQqqdQQqQ")

NO_STEP = -(1 << 63)
HEALED = -1
NAME_BYTES = 31

DATA_WAIT = "data wait"
"""The phase of a rank that waits for its next batch (``robust_slurm.data``)."""

# "Not given" is a NaN too, told from a loss that became NaN by its payload (readers compare bits).
ABSENT_BITS = b"\x0b\xea\x70\xab\x5e\x17\xf8\x7f"
ABSENT: float = unpack("<d", ABSENT_BITS)[0]

EXPLICIT, AUTO, REGEX = 1, 2, 3
ANEW = 4
"""The source AUTO, in a process at whose first step its optimizer made its own first one, too."""


def record_path(directory: str, epoch: int, local_rank: int) -> str:
    """Path of the record of one local rank in one epoch."""
    return os.path.join(directory, f"{epoch}-{local_rank}.beat")  # noqa: PTH118 - see the docstring


def beside(record: str, suffix: str) -> str:
    """Path of another file of the rank and epoch that this record is of."""
    return record[: -len(".beat")] + suffix


def encode_name(name: str) -> bytes:
    """UTF-8 of ``name``, cut to NAME_BYTES between characters, never inside one."""
    raw = name.encode("utf-8", "replace")
    if len(raw) > NAME_BYTES:
        raw = raw[:NAME_BYTES].decode("utf-8", "ignore").encode("utf-8")
    return raw


def create_file(path: str, epoch: int, local_rank: int, rank: int) -> int:
    """Make an unclaimed record, mode 0600, and return a read-write descriptor of it.

    The file gets its name only when it is complete, so nobody can ever open a short one.
    Raises FileExistsError when the name is taken, OSError when the directory refuses.
    """
    draft = f"{path}.{os.getpid()}.new"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(draft, flags, 0o600)
    try:
        head = HEADER.pack(MAGIC, VERSION, SIZE, epoch, local_rank, rank, 0)
        os.write(fd, head.ljust(SIZE, b"\0"))
        os.link(draft, path)
    except BaseException:
        os.close(fd)
        raise
    finally:
        os.unlink(draft)  # noqa: PTH108 - pathlib is an import the rank does not need
    return fd


def write_nan(record: mmap, beats: int, step: int, proven: int, loss: float) -> None:
    """Fill the sound and nan sections for a beat that is not written yet.

    The beat before it shows which ranks still had a finite loss where another one's was not.
    """
    _, last, _, before, *_ = BEAT.unpack_from(record, BEAT_AT)
    known = beats > 1 and before - before == 0.0 and 0 <= last < 1 << 62
    SOUND.pack_into(record, SOUND_AT, last + 1 if known else 0)
    try:
        NAN.pack_into(record, NAN_AT, beats, step, proven, loss, beats)
    except error:  # a step beyond 64 bits
        NAN.pack_into(record, NAN_AT, beats, NO_STEP, NO_STEP, loss, beats)


def clear_nan(record: mmap) -> None:
    """Empty the nan section: a loss is finite again."""
    SOUND.pack_into(record, SOUND_AT, HEALED)
    NAN.pack_into(record, NAN_AT, 0, 0, 0, 0.0, 0)
