"""The beat record: layout, hostile content, torn reads, the shim's writer."""

import math
import os
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_slurm import layout
from robust_slurm.record import BeatReader, RecordWriter, create, parse, record_path, scan


def raw_record(**change: object) -> bytes:
    """A whole record: step 7, loss 2.5, phase "eval"; fields can be changed by name."""
    field = {
        "magic": layout.MAGIC, "version": layout.VERSION, "size": layout.SIZE,
        "epoch": 3, "local_rank": 1, "rank": 9, "pid": 4242,
        "head": 5, "step": 7, "t": 100.5, "loss": 2.5, "grad": layout.ABSENT, "source": 1,
        "tail": 5, "sound": 0,
        "phead": 2, "since": 99.0, "depth": 1, "length": 4, "name": b"eval", "ptail": 2,
        "nan": 0, "nan_step": 0, "proven": 0, "nan_loss": 0.0, "nan_tail": 0,
        "proofs": 0, "proof": 0, "proofs_tail": 0,
    } | change  # fmt: skip
    return layout.RECORD.pack(*field.values())


def test_record_struct_is_the_six_sections_in_their_places() -> None:
    raw = raw_record()
    assert len(raw) == layout.SIZE == layout.RECORD.size
    assert layout.HEADER.unpack_from(raw, layout.HEADER_AT)[-1] == 4242
    assert layout.BEAT.unpack_from(raw, layout.BEAT_AT)[1] == 7
    assert layout.SOUND.unpack_from(raw_record(sound=9), layout.SOUND_AT) == (9,)
    assert layout.PHASE.unpack_from(raw, layout.PHASE_AT)[4].startswith(b"eval")
    assert layout.NAN.unpack_from(raw_record(nan=9), layout.NAN_AT)[0] == 9
    assert layout.PROVEN.unpack_from(raw_record(proof=9), layout.PROVEN_AT)[1] == 9


def test_parse_whole_record() -> None:
    beat = parse(raw_record())
    assert beat is not None
    assert beat._asdict() == {
        "pid": 4242, "epoch": 3, "local_rank": 1, "rank": 9, "step": 7, "beats": 5,
        "t_mono": 100.5, "loss": 2.5, "grad_norm": None, "source": "explicit",
        "phase": "eval", "phase_since": 99.0, "phases": 2, "nan": None, "proven": None,
        "sound": None, "healed": False,
    }  # fmt: skip


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0])
def test_a_bad_loss_is_not_a_missing_loss(value: float) -> None:
    beat = parse(raw_record(loss=value))
    assert beat is not None
    assert beat.loss is not None
    assert struct.pack("<d", beat.loss) == struct.pack("<d", value)


@pytest.mark.parametrize(
    ("step", "proven", "expected"),
    [(7, 6, (7, 6)), (layout.NO_STEP, layout.NO_STEP, (None, None)), (0, -1, (0, -1))],
)
def test_the_first_loss_that_is_not_finite(
    step: int, proven: int, expected: tuple[int | None, int | None]
) -> None:
    beat = parse(raw_record(nan=5, nan_step=step, proven=proven, nan_loss=math.inf, nan_tail=5))
    assert beat is not None and beat.nan is not None
    assert (beat.nan.step, beat.nan.proven, beat.nan.loss) == (*expected, math.inf)


@pytest.mark.parametrize(
    ("nan", "sound", "expected"),
    [
        (5, 0, (None, False)),
        (5, 1, (0, False)),
        (5, 7, (6, False)),
        (5, layout.HEALED, (None, False)),
        (0, layout.HEALED, (None, True)),
        (0, 7, (None, False)),  # written just before the loss itself
        (0, 0, (None, False)),
        (0, -9, (None, False)),
    ],
)
def test_the_loss_before_the_first_that_is_not_finite(
    nan: int, sound: int, expected: tuple[int | None, bool]
) -> None:
    beat = parse(raw_record(nan=nan, nan_loss=math.nan, nan_tail=nan, sound=sound))
    assert beat is not None and (beat.sound, beat.healed) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"magic": b"\0" * 8},
        {"version": 99},
        {"size": 128},
        {"tail": 4},
        {"head": 6},
        {"ptail": 1},
        {"t": 0.0},
        {"t": math.nan},
        {"t": -1.0},
        {"since": math.inf},
        {"source": 77},
        {"length": 32},
        {"length": 1 << 31},
        {"name": b"\xff\xfe\xff\xff"},
        {"nan": 5, "nan_loss": math.nan},
        {"nan": 5, "nan_tail": 5},  # of a loss that is finite
    ],
    ids=str,
)
def test_torn_or_hostile_record_is_none(change: dict[str, object]) -> None:
    assert parse(raw_record(**change)) is None


def test_control_characters_in_a_phase_name_do_not_reach_a_terminal() -> None:
    beat = parse(raw_record(name=b"\x1b[2J"))
    assert beat is not None
    assert beat.phase == "?[2J"


def test_unwritten_sections_read_as_nothing_yet(tmp_path: Path) -> None:
    path = record_path(str(tmp_path), 0, 0)
    create(path, epoch=0, local_rank=0, rank=5)
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    beat = BeatReader(path).read()
    assert beat is not None
    assert (beat.pid, beat.rank, beat.step, beat.beats, beat.source) == (0, 5, None, 0, None)
    assert (beat.t_mono, beat.phase, beat.phase_since) == (0.0, "", 0.0)
    assert [p.name for p in tmp_path.iterdir()] == ["0-0.beat"]  # no draft stays behind


def test_the_end_of_the_process_that_reports_is_seen(tmp_path: Path) -> None:
    path = record_path(str(tmp_path), 0, 0)
    create(path, epoch=0, local_rank=0)
    reader = BeatReader(path)
    assert reader.read() is not None and not reader.ended()  # nobody has claimed it
    code = "import sys, robust_slurm as r; r.beat(1); print(flush=True); sys.stdin.read()"
    env = {**os.environ, "ROBUST_BEAT_DIR": str(tmp_path), "LOCAL_RANK": "0"}
    pipe = subprocess.PIPE
    rank = subprocess.Popen([sys.executable, "-c", code], env=env, stdin=pipe, stdout=pipe)
    assert rank.stdin is not None and rank.stdout is not None
    with rank.stdout, rank:
        assert rank.stdout.readline() == b"\n"
        assert reader.read() is not None and not reader.ended()
        rank.stdin.close()
        assert os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT) is not None
        assert reader.ended()  # a zombie has


@given(st.binary(max_size=300))
def test_parse_never_raises(raw: bytes) -> None:
    parse(raw)


@pytest.mark.slow
@given(st.binary(min_size=224, max_size=224))
def test_parse_never_raises_behind_a_good_header(raw: bytes) -> None:
    parse(raw_record()[:32] + raw)


@given(st.text())
def test_encoded_name_is_a_prefix_and_fits(name: str) -> None:
    raw = layout.encode_name(name)
    assert len(raw) <= layout.NAME_BYTES
    whole = name.encode("utf-8", "replace").decode()
    assert whole.startswith(raw.decode())


def test_reader_waits_for_the_file_and_survives_its_loss(tmp_path: Path) -> None:
    path = tmp_path / "0-0.beat"
    reader = BeatReader(str(path))
    assert reader.read() is None
    path.write_bytes(raw_record())
    assert reader.read() is not None
    os.truncate(path, 0)  # a mapped file would end the reader with SIGBUS here
    last = reader.read()
    assert last is not None
    assert last.step == 7
    reader.close()
    assert BeatReader(str(path)).read() is None


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory", "short", "long", "nul"])
def test_reader_takes_only_a_plain_file_of_the_right_size(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.beat"
    good = tmp_path / "good"
    good.write_bytes(raw_record())
    if kind == "symlink":
        path.symlink_to(good)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "short":
        path.write_bytes(raw_record()[:-1])
    elif kind == "long":
        path.write_bytes(raw_record() + b"x")
    assert BeatReader(str(path) + ("\0" if kind == "nul" else "")).read() is None


def test_half_written_record_keeps_the_last_good_reading(tmp_path: Path) -> None:
    path = tmp_path / "x.beat"
    path.write_bytes(raw_record())
    reader = BeatReader(str(path))
    first = reader.read()
    path.write_bytes(raw_record(head=6, step=8))  # stopped (SIGSTOP, say) in mid-write
    assert reader.read() == first
    path.write_bytes(raw_record(head=6, step=8, tail=6))
    beat = reader.read()
    assert beat is not None
    assert beat.step == 8


@pytest.mark.slow
def test_reading_beside_a_busy_writer_is_never_torn(tmp_path: Path) -> None:
    path = record_path(str(tmp_path), 0, 0)
    code = (
        "import time, robust_slurm as r\n"
        "n = 0\n"
        "while True:\n"
        "    n += 1\n"
        "    r.beat(n, loss=float(n), grad_norm=-float(n))\n"
        "    r.phase(str(n) * 3).__enter__() if n % 3 else None\n"
        "    end = time.monotonic() + 20e-6\n"
        "    while time.monotonic() < end: pass\n"
    )
    env = {**os.environ, "ROBUST_BEAT_DIR": str(tmp_path), "LOCAL_RANK": "0"}
    writer = subprocess.Popen([sys.executable, "-c", code], env=env)
    try:
        reader = BeatReader(path)
        seen: set[int] = set()
        end = time.monotonic() + 20
        while len(seen) < 2000 and time.monotonic() < end:
            beat = reader.read()
            if beat is None or beat.step is None:
                continue
            assert beat.loss == beat.step == beat.beats
            assert beat.grad_norm == -beat.step
            third = len(beat.phase) // 3
            assert beat.phase[:31] == (beat.phase[:third] * 3)[:31]
            seen.add(beat.step)
        assert len(seen) >= 2000
    finally:
        writer.kill()
        writer.wait(10)


def test_scan_finds_records_of_one_epoch_only(tmp_path: Path) -> None:
    for epoch, rank in ((0, 0), (1, 0), (1, 12)):
        create(record_path(str(tmp_path), epoch, rank), epoch=epoch, local_rank=rank)
    for name in (
        "1-.beat",
        "1--1.beat",
        "1-2.beat.77.new",
        "1-99999.beat",
        "1-².beat",
        "11-3.beat",
    ):
        (tmp_path / name).touch()
    assert sorted(scan(str(tmp_path), 1)) == [0, 12]
    assert scan(str(tmp_path / "none"), 1) == {}


def test_create_does_not_overwrite(tmp_path: Path) -> None:
    path = record_path(str(tmp_path), 0, 0)
    create(path, epoch=0, local_rank=0)
    with pytest.raises(FileExistsError):
        create(path, epoch=0, local_rank=0)
    assert len(list(tmp_path.iterdir())) == 1


def test_regex_writer_counts_and_gives_way_to_the_script(tmp_path: Path) -> None:
    path = record_path(str(tmp_path), 0, 0)
    create(path, epoch=0, local_rank=0)
    writer, reader = RecordWriter(path), BeatReader(path)
    assert writer.beat(40)
    assert writer.beat()
    beat = reader.read()
    assert beat is not None
    assert (beat.step, beat.beats, beat.source, beat.loss) == (41, 2, "regex", None)
    assert writer.beat(1 << 80)
    beat = reader.read()
    assert beat is not None
    assert (beat.step, beat.beats) == (None, 3)
    Path(path).write_bytes(raw_record())
    assert not writer.beat(1)
    writer.close()
    (tmp_path / "short").touch()
    with pytest.raises(OSError, match="not a beat record"):
        RecordWriter(str(tmp_path / "short"))
