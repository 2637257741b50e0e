"""Processors: all of them online, and at the frequency that the site wants.

Read at the first processor, whose settings the others share unless somebody set them one by one.
"""

from __future__ import annotations

from health.check import Check, Condition, Setting
from health.finding import Finding
from health.node.sysfs import number, text
from health.node.system import System

OFFLINE = Condition(
    "cpu-offline", "WARN", "node", "none", "processors are offline, and SMT is not switched off"
)
GOVERNOR = Condition(
    "cpu-governor", "WARN", "node", "none", "the frequency governor is not the expected one"
)
CAPPED = Condition(
    "cpu-capped", "WARN", "node", "none", "the frequency is limited below the processor's maximum"
)

BASE = "/sys/devices/system/cpu"


def _run(system: System) -> list[Finding]:
    found = []
    offline = text(system, f"{BASE}/offline")
    smt = text(system, f"{BASE}/smt/control")
    # With SMT off the siblings are offline, as they should be. What firmware only announces
    # ("possible") is not "present" and may stand in "offline" as well.
    present, online = text(system, f"{BASE}/present"), text(system, f"{BASE}/online")
    if offline and smt not in ("off", "forceoff") and present != online:
        found.append(OFFLINE.found(f"online {online}, present {present}"))
    policy = f"{BASE}/cpu0/cpufreq"
    wanted = system.options("cpu")["governor"]
    governor = text(system, f"{policy}/scaling_governor")
    if wanted and governor and governor != wanted:
        found.append(GOVERNOR.found(f"governor {governor}, expected {wanted}"))
    limit = number(system, f"{policy}/scaling_max_freq")
    can = number(system, f"{policy}/cpuinfo_max_freq")
    if limit and can and limit < can:
        said = f"at most {limit // 1000} MHz of {can // 1000} MHz, {policy}/scaling_max_freq"
        found.append(CAPPED.found(said))
    return found


CHECK = Check(
    name="cpu",
    run=_run,
    conditions=(OFFLINE, GOVERNOR, CAPPED),
    settings={"governor": Setting("", 'the frequency governor: "performance"; empty: any')},
    closes_on_error=False,
    cost_ms=0.2,
)
