"""Every number that the simulator uses, with its source. Pure data.

The source of a MEASURED number is a file of docs/bench and its metric (median and p95; a test
compares them); that of a PUBLISHED one is the paper, whose means have no spread. SEEN: measured,
but the record was lost. ASSUMED: the source is the reason.
"""

from __future__ import annotations

from bench.simulate.events import ASSUMED, MEASURED, PUBLISHED, SEEN, Time

BYTEROBUST = "ByteRobust (arXiv 2509.16293)"


def measured(source: str, median: float, p95: float) -> Time:
    """A metric of docs/bench: ``FILE KEY``."""
    return Time(median, p95, MEASURED, source)


def published(source: str, seconds: float) -> Time:
    """A number of a paper."""
    return Time(seconds, seconds, PUBLISHED, source)


def assumed(why: str, seconds: float) -> Time:
    """A number that nobody measured."""
    return Time(seconds, seconds, ASSUMED, why)


NONE = Time(0.0, 0.0, MEASURED, "")

# The job.
STEP = assumed("a step of a dense model of 70 B and more parameters on 9,600 GPUs", 10.0)
REFILL_H = assumed("hours until a standby node that was used is replaced by another", 24.0)

# Detection, ours.
EXIT = measured("recovery-after-2026-11-25 rank_kill_torch.detect_s", 0.01, 0.04)
NODE = measured("recovery-after-2026-11-25 node_crash_standby.detect_s", 1.175, 1.29)
MOUNT = measured("faults-2026-11-26 mount_dead.detect_s", 30.705, 30.866)
STUCK_GROUP = measured("faults-2026-11-26 stuck_group.detect_s", 11.575, 11.710)
LINK = assumed("until NCCL gives up InfiniBand's retries", 60.0)
LOOK = 1.6  # s, for the look at the ranks of a hang: STUCK_GROUP less hang_floor


def nan(step_s: float) -> Time:
    """A NaN is reported with its step."""
    return assumed("a NaN is reported with its step", step_s)


def hang(step_s: float) -> Time:
    """The limit of srun_wrapper/job/pace.py for a hang that is proven, and the look at the ranks.

    One that nothing proves takes hang_limit (300 s) at least: see docs/simulate.md.
    """
    why = "a hang that is proven: ten times the slowest step ever, and 1.6 s for the look"
    return assumed(
        f"{why} at the ranks (faults-2026-11-26 stuck_group)", max(10.0, 10 * step_s) + LOOK
    )


SLOWDOWN = 1.0 - 1.0 / 1.3  # lost of each second while steps take 1.3 times as long
SLOW = assumed(
    "30 min until a person acts on the warning, with steps 1.3 times as long", 1800 * SLOWDOWN
)

# Recovery, ours. Nothing of ours has run on more than one GPU node, so the start of the ranks at
# scale is ByteRobust's hot update, from the request until training goes on (table 7).
HOT_UPDATE = {128: 46.0, 256: 51.0, 512: 54.0, 1024: 65.0}
DECIDE = measured("scale-2026-11-26 400x4.node_crash.decide_s", 0.0013, 0.0013)
STOP = measured("scale-2026-11-26 400x4.node_crash.stop_s", 0.6673, 0.6673)
STANDBY = measured("recovery-after-2026-11-25 node_crash_standby.replace_s", 0.0, 0.95)
FETCH_GB = measured("restore-2026-11-23 restore_peer_1GB.s", 0.4948, 0.7993)
STATE_GB = 3.0  # of one rank
TESTS = assumed("stop_tests, its default limit (a lab of 8 nodes without GPUs took 19 s)", 60.0)
REPLAY = published(f"{BYTEROBUST}, table 6: NaN, mean", 4289.0)
GIVE_UP = assumed("standby_wait, its default, before the job goes back to the queue", 30.0)
HELPER = Time(2.7513, 3.3178, SEEN, "a requeue by the helper job, 2026-11-26 (20 runs)")
COLD = published("FT-HSDP: cold recovery at 16,000 GPUs, about", 200.0)
DURABLE = assumed("seconds between durable checkpoints (every 100 steps)", 1000.0)
WRONG = 4 / 60  # healthy nodes evicted per run: faults-2026-11-26 faults.false_evictions, .runs

# The cost of saving a step.
SAVE = Time(
    0.005,
    0.005,
    SEEN,
    "save() and hook of 1 GB in 768 tensors took 3.8 ms, rounded up (12,000 small tensors: 29 ms) "
    "on one H200, 2026-11-26; the record was not kept",
)
SAVE_PAPER = published(f"{BYTEROBUST}, table 8, 0.01 to 0.04 s", 0.02)
SAVE_MFU = published(
    f"{BYTEROBUST}, table 8: 0.89 % of MFU at most", STEP.median * 0.0089 / (1.0 - 0.0089)
)
SAVE_FILES = published(f"{BYTEROBUST}, table 8: Megatron save, 256B", 12.98)
SAVE_LOCAL = measured("save-peers-2026-11-26 nvrx_async_256MB.blocked_s", 0.1527, 0.2056)
HALF_HOUR = 1800.0  # between checkpoints on files: ByteRobust, section 2
LOCAL_INTERVAL = 300.0  # assumed

# ByteRobust.
INSPECT = {
    "gpu": published(f"{BYTEROBUST}, table 3: GPU", 10.0),
    "nic": published(f"{BYTEROBUST}, table 3: NIC", 30.0),
    "node": published(f"{BYTEROBUST}, table 3: OS kernel", 2.0),
    "exit": assumed(f"as long as the GPU inspection of {BYTEROBUST}", 10.0),
    "mount": assumed(f"as long as the GPU inspection of {BYTEROBUST}", 10.0),
    "hang": published(f"{BYTEROBUST}: 10 min without RDMA traffic", 600.0),
    "slow": SLOW._replace(source="as ours, for want of a number"),
    "nan": nan(STEP.median),
    "wish": NONE,
}
# Table 6, from localization to the restart: mean, and the largest.
RESTART = {
    "CUDA error": (93.0, 600.0),
    "InfiniBand error": (60.0, 60.0),
    "HDFS error": (58.0, 65.0),
    "OS kernel panic": (109.0, 120.0),
    "GPU memory error": (10.0, 10.0),
    "NaN value": (4289.0, 7200.0),
    "GPU unavailable": (10.0, 10.0),
    "code/data adjustment": (57.0, 64.0),
    "code": (57.0, 64.0),
}
REQUEUE_TABLE = {128: 454.0, 256: 545.0, 512: 635.0, 1024: 768.0}  # table 7
# Its WAS is within 5.19 % of an oracle's, and 1 % of the weight is the switch whose 32 machines
# are rescheduled: 0.01 (R / S - 1) = 0.0519. A test compares the two other ratios with it.
RESCHEDULE_RATIO = 1.0 + 0.0519 / 0.01
UNPRODUCTIVE = 3000.0  # the longest: 50 min

# Plain Slurm.
SILENT = assumed("SlurmdTimeout, its default", 300.0)
KILL_WAIT = assumed("KillWait, its default", 30.0)
WATCHDOG = assumed("torch's NCCL watchdog, its default", 600.0)
BEGIN_WAIT = Time(120.6083, 121.0022, SEEN, "a requeue by Slurm, 2026-11-26 (20 runs)")
PERSON = assumed("a person finds the node, or the code, that fails again and again", 1800.0)

# NVRx and torchft.
NVRX_COLD = measured("recovery-2026-11-22 nvrx_kill.total_s", 13.4616, 16.5282)
TORCHFT = published("FT-HSDP: all replicas wait per failure, about", 180.0)
REPLICA = 8  # nodes of a replica; assumed: a pipeline, as in ByteRobust

GUESSES = (
    (f"a step of {STEP.median:g} s (--step)", STEP.source),
    (f"refill in {REFILL_H.median:g} h (--refill)", REFILL_H.source),
    (f"{STATE_GB:g} GB per rank", "restored: its own part of the state, and the shared one"),
    ("0.5 to 1.5 steps", "done again after a fault"),
    ("59 % bad machines", "of the faults that name none; a restart in place does not cure these "
     "(ByteRobust: direct evictions against reattempts)"),
    ("1 % switches", "of the explicit faults: 32 nodes at once, with the copies in their memory"),
)  # fmt: skip
