# ruff: noqa: E501 - a table, a way a line
"""Ways to wait and to write (A, B): a toy of two ranks that is idle, or busy without a step."""

from __future__ import annotations

from bench.parity.way import TOY, Way

STORE = "python {programs}/store.py 8123; export STORE=$SLURMD_NODENAME:8123"


def _wait(name: str, tells: str, *waits: str, kind: str = "A", **more: object) -> Way:
    """Return a way whose toy waits; `+beat` in the name: its steps are reported."""
    beat = " --beat" if more.pop("beat", True) else ""
    options = "".join(f" --wait {wait}" for wait in waits)
    seconds = 6 + max(0.0, sum(float(wait.split(":")[2]) for wait in waits))
    more = {"seconds": seconds, **more}
    return Way(name=name, kind=kind, tells=tells, program=f"{TOY}{options}{beat}", **more)  # type: ignore[arg-type]


IDLE = [
    _wait("sleep_30", "all ranks sleep 30 s at one step", "sleep:40:30"),
    _wait("sleep_30_unseen", "the same, of a program whose steps are not seen", "sleep:40:30", beat=False),
    _wait("evaluation_25", "an idle evaluation of 25 s", "select:30:25"),
    _wait("evaluation_90", "an idle evaluation of 90 s", "select:30:90"),
    _wait("evaluation_90_unseen", "an idle evaluation of 90 s, steps not seen", "select:30:90", beat=False),
    _wait("recv_40", "all ranks wait 40 s in recv for a slow object store", "recv:25:40"),
    _wait("get_60", "all ranks read for 60 s from a slow object store, by HTTP", "get:25:60", before=STORE),
    _wait("get_60_one", "rank 1 alone reads for 60 s by HTTP", "get:25:60:1", before=STORE),
    _wait("upload_back_off", "rank 0 uploads by HTTP with back-off for 60 s", "put:25:60:0", before=STORE),
    _wait("upload_unseen", "rank 1 uploads by HTTP with back-off for 45 s, steps not seen", "put:25:45:1", before=STORE, beat=False),
    _wait("spool_60", "rank 0 saves 64 KiB every 3 s for 60 s", "spool:30:60:0"),
    _wait("spool_all_60", "all ranks save 64 KiB every 3 s for 60 s", "spool:30:60"),
    _wait("two_waits", "30 s at step 2 and again at step 40", "sleep:2:30", "sleep:40:30"),
    _wait("growing_waits", "waits of 5, 10, 20 and 40 s", "sleep:10:5", "sleep:20:10", "sleep:30:20", "sleep:40:40"),
    _wait("shrinking_waits", "waits of 40, 20 and 15 s", "sleep:10:40", "sleep:20:20", "sleep:30:15"),
    _wait("lock_file", "rank 1 waits 40 s for a lock file of rank 0", "lock:30:40"),
    _wait("poll_file", "rank 0 looks twice a second for a file, for 30 s", "poll:30:30:0"),
    _wait("thread_event", "all ranks wait 30 s for a thread's event", "event:30:30"),
    _wait("thread_join", "rank 1 joins a thread that sleeps 40 s", "thread:30:40:1"),
    _wait("loader", "all ranks wait 30 s for a batch of a loader's process", "loader:30:30"),
    _wait("loader_one", "rank 0 waits 45 s for a batch", "loader:30:45:0"),
    _wait("child_sleeps", "rank 0 waits 60 s for a child that is idle", "child:30:60:0"),
    _wait("asyncio", "all ranks wait 30 s in an event loop", "asyncio:30:30"),
    _wait("signal_wait", "all ranks wait 30 s for a signal", "pause:30:30"),
    _wait("trickle", "rank 0 receives a byte every 5 s for 60 s", "trickle:30:60:0"),
    _wait("fifo", "rank 1 opens a named pipe whose writer comes after 30 s", "fifo:30:30:1"),
    _wait("sqlite", "rank 1 waits 40 s for a database that rank 0 has locked", "sqlite:30:40"),
    _wait("gil_calls", "rank 0 sleeps 40 s in calls that keep the interpreter's lock", "gil:30:40:0"),
    _wait("gil_one_call", "rank 0 sleeps 40 s in one call that keeps the interpreter's lock", "one_call:30:40:0"),
    _wait("gil_all", "all ranks sleep 30 s in one call that keeps the interpreter's lock", "one_call:30:30"),
    _wait("long_first_step", "the first step takes 60 s", "sleep:1:60"),
    _wait("long_import", "30 s before anything, as a long import", "sleep:0:30"),
    _wait("long_import_one", "rank 1 needs 60 s before it joins", "sleep:0:60:1"),
    _wait("last_step_60", "60 s after the last step", "sleep:50:60"),
    _wait("rank_0_writes_last", "rank 0 alone is 60 s in its last step", "select:50:60:0"),
]  # fmt: skip
LONG = [
    _wait("evaluation_240", "an idle evaluation of 4 min", "select:30:240", long=True),
    _wait("evaluation_240_unseen", "an idle evaluation of 4 min, steps not seen", "select:30:240", beat=False, long=True),
    _wait("get_240_one", "rank 1 alone reads for 4 min by HTTP", "get:25:240:1", before=STORE, long=True),
    _wait("two_waits_of_180", "3 min at step 2 and again at step 40", "sleep:2:180", "sleep:40:180", long=True),
    _wait("c_save_240", "rank 0 saves 5 MB/s for 4 min in one C call", "csave:40:240:0", kind="B", long=True),
    _wait("tar_240", "a child of rank 1 writes for 4 min", "tar:40:240:1", kind="B", long=True),
    _wait("import_240", "4 min before anything, as an import from a slow file system", "sleep:0:240", long=True),
    _wait("last_step_240", "4 min after the last step", "sleep:50:240", long=True),
]  # fmt: skip
WRITES = [
    _wait("c_save_100", "rank 0 saves 5 MB/s for 100 s in one C call", "csave:40:100:0", kind="B"),
    _wait("c_save_100_unseen", "the same, steps not seen", "csave:40:100:0", kind="B", beat=False),
    _wait("c_save_all_80", "all ranks save 5 MB/s for 80 s in one C call", "csave:40:80", kind="B"),
    _wait("c_save_locked_90", "rank 0 saves 90 s in one C call that keeps the interpreter's lock", "csave_locked:40:90:0", kind="B"),
    _wait("fsync_80", "rank 0 writes and fsyncs for 80 s", "fsync:40:80:0", kind="B"),
    _wait("crunch_40", "rank 0 computes 40 s in C calls of 10 s", "crunch:40:40:0", kind="B", heavy=True),
    _wait("zstd_80", "a child of rank 0 compresses for 80 s", "pack:40:80:0", kind="B"),
    _wait("tar_80", "a child of rank 1 writes for 80 s", "tar:40:80:1", kind="B"),
    _wait("tar_all_60", "children of all ranks write for 60 s", "tar:40:60", kind="B"),
    _wait("mapped_80", "rank 0 writes a mapped file page by page for 80 s", "pages:40:80:0", kind="B"),
    _wait("zlib_60", "rank 1 compresses with pauses for 60 s", "squeeze:40:60:1", kind="B"),
    _wait("small_files_60", "all ranks write two small files a second for 60 s", "small_files:40:60", kind="B"),
]  # fmt: skip
SHAPES = [
    Way(name="varying_steps", kind="A", tells="every tenth step takes 100 times as long", program=f"{TOY} --beat --vary 100", seconds=36),
    Way(name="varying_unseen", kind="A", tells="every tenth step takes 200 times as long, not seen", program=f"{TOY} --vary 200", seconds=66),
    Way(name="ends_apart", kind="A", tells="rank 1 ends 60 s after rank 0", program=f"{TOY} --beat --after 60", seconds=66),
    Way(name="ends_apart_unseen", kind="A", tells="rank 1 ends 60 s after rank 0, steps not seen", program=f"{TOY} --after 60", seconds=66),
    Way(name="early_exit", kind="A", tells="rank 0 ends, rank 1 works on alone for 40 s", program=f"{TOY} --alone --beat --wait sleep:10:40:1", seconds=46),
    Way(name="early_exit_unseen", kind="A", tells="rank 1 ends, rank 0 works on alone for 40 s", program=f"{TOY} --alone --wait sleep:10:40:0", seconds=46),
]  # fmt: skip
WAITS = [*IDLE, *LONG, *WRITES, *SHAPES]
