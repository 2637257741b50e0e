"""The clock: how far it may be off, and whether reading it is cheap.

What the kernel knows (adjtimex) ends at 16 s, NTP_PHASE_LIMIT of linux/timex.h: a clock whose
daemon lost its servers becomes "unsynchronised" instead. And 16 s is also the estimate that nobody
ever set: phc2sys clears STA_UNSYNC and leaves the estimate alone.
"""

from __future__ import annotations

from health.check import Check, Condition, Setting
from health.finding import Finding
from health.node.sysfs import text
from health.node.system import System

WRONG = Condition("clock-wrong", "FAIL", "node", "none", "the clock error may exceed `wrong`")
DRIFT = Condition("clock-drift", "WARN", "node", "none", "the clock error may exceed `drift`")
UNSYNCHRONISED = Condition(
    "clock-unsynchronised", "WARN", "node", "none", "no daemon synchronises the clock"
)
SOURCE = Condition(
    "clocksource-slow",
    "WARN",
    "node",
    "none",
    "the kernel no longer uses the processor's time-stamp counter: reading the clock is slow",
)

PHASE_LIMIT = 16.0  # s
_SOURCES = "/sys/devices/system/clocksource/clocksource0"
_SLOW = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")


def judge_offset(offset: float | None, drift: float, wrong: float) -> list[Finding]:
    """Seconds by which the clock may be off; None: nobody knows."""
    if offset is None:
        return [UNSYNCHRONISED.found("adjtimex reports STA_UNSYNC: is chronyd or ntpd running?")]
    off = abs(offset)
    if off >= PHASE_LIMIT:
        off -= PHASE_LIMIT
    if off > wrong:
        return [WRONG.found(f"off by up to {off:.3f} s (adjtimex), limit {wrong:g} s")]
    if off > drift:
        return [DRIFT.found(f"off by up to {off:.3f} s (adjtimex), limit {drift:g} s")]
    return []


def _run(system: System) -> list[Finding]:
    options = system.options("clock")
    found = []
    if options["synchronised"]:
        offset = system.clock_offset()
        found += judge_offset(offset, float(options["drift"]), float(options["wrong"]))
    source = text(system, f"{_SOURCES}/current_clocksource")
    if source in _SLOW:
        found.append(SOURCE.found(f"clock source {source}, {_SOURCES}/current_clocksource"))
    return found


CHECK = Check(
    name="clock",
    run=_run,
    conditions=(WRONG, DRIFT, UNSYNCHRONISED, SOURCE),
    settings={
        "synchronised": Setting(True, "a daemon must synchronise the clock of this node"),
        "drift": Setting(0.5, "largest clock error that is not reported", "s"),
        "wrong": Setting(
            10.0, "largest clock error at which the node accepts jobs (munge fails at 300 s)", "s"
        ),
    },
    closes_on_error=False,
    cost_ms=1.0,
)
