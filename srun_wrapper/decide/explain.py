"""The rules of diagnosis and of the ladder as text, with the limits in force (pure)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from robust_slurm.config import FIELDS, Config
from srun_wrapper.decide.bounds import RULE
from srun_wrapper.decide.diagnose import RULES
from srun_wrapper.decide.diagnosis import REPLAYED, TESTED, Then
from srun_wrapper.decide.flaps import NO_REBOOT, WINDOW
from srun_wrapper.decide.incident import REJOIN
from srun_wrapper.decide.ladder import BACK, RUNGS

WIDTH = 100
LIMITS = (
    "max_restarts",
    "stop_tests",
    "replay",
    "spares",
    "standby_partition",
    "standby_wait",
    "requeue",
    "requeue_on",
    "nan",
    "slow",
    "slow_after",
    "hang",
    "hang_floor",
    "hang_limit",
    "busy_limit",
    "start_limit",
    "outage_wait",
    "stall_limit",
    "mute_limit",
    "launch_limit",
    "rejoin_limit",
    "signatures_file",
)


def explain(config: Config) -> list[str]:
    """Return the lines that ``robust-srun --robust-explain`` prints."""
    return [
        "Rules in force. Of each table the first rule that applies decides. An incident's record "
        "has its id",
        "as rule (diagnosis) and rung (ladder). Without progress: no step beyond those done "
        "before.",
        "",
        "Diagnosis: from symptoms to a cause, and what follows",
        *_diagnosis(config),
        "",
        "Ladder: what is done",
        *_ladder(),
        "",
        "Nodes to evict",
        *textwrap.wrap(RULE, WIDTH, initial_indent="  ", subsequent_indent="  "),
        "",
        "Limits in force (robust-srun --robust-help describes each)",
        *_limits(config),
    ]


def follows(then: Then, config: Config) -> str:
    """Return the consequence of a rule in words."""
    tests = f"tests of the machines (at most {config.stop_tests:g} s)" if config.stop_tests else ""
    second = "the node is evicted the second time without progress"
    if tests:
        second = f"the second time without progress {tests}, and the node is evicted; if it passed "
        second += "them, the third time"
    return {
        "evict": "the node is evicted now",
        "second": f"restart in place; {second}",
        "exchange": "restart in place; the second time without progress: "
        + (f"{tests}, and " if tests else "")
        + "the node exchanges its ranks with another one; if a rank dies so on it again, it is "
        "evicted the third time, where max_restarts allows a third; if it dies so on the other "
        "node, the program is to blame",
        "exchange nan": (f"{tests} now; " if tests else "restart in place; ")
        + "the second time without progress the node exchanges its ranks with another one; if the "
        "NaN stays on the node, it is evicted the third time; if it follows the ranks, the job "
        "stops",
        "exchange sdc": (f"{tests} now; " if tests else "")
        + "restart from the newest certified step; the node exchanges its ranks with another one. "
        "If it happens on this node again, it is evicted; if it follows the rank, these ranks no "
        "longer share their state, and the job continues",
        "test first": (f"{tests} now; " if tests else "restart in place; ")
        + "the node is evicted the second time without progress",
        "test only": (f"{tests} now; " if tests else "restart in place; ")
        + "the node is evicted only if tests prove it bad",
        "test": (f"{tests} now; " if tests else "")
        + "the job stops at the second time unless a machine is proven bad",
        "stop": "restart in place; the job stops if the same error recurs without progress",
        "stop now": "the job stops now; restart in place if ranks have made steps before",
        "restart": "restart in place; no node is evicted",
    }[then]


def _diagnosis(config: Config) -> Iterator[str]:
    for rule in RULES:
        then = follows(rule.then, config)
        rows = (("if", rule.evidence), ("verdict", rule.verdict), ("follows", then))
        yield from _block(f"{rule.id} ({rule.symptom})", rows)
    tests = "tests of the machines name a node while the ranks are down"
    replay = "a replay of the job in small groups of nodes names a node"
    for named, evidence, setting, on in (
        (TESTED, tests, "stop_tests", config.stop_tests),
        (REPLAYED, replay, "replay", config.replay),
    ):
        then = follows("evict", config) if on else f"off ({setting} = 0)"
        rows = (("if", evidence), ("verdict", "the node is proven bad"), ("follows", then))
        yield from _block(f"{named} (in place of the rule before)", rows)
    yield from _block(
        "flap (after node-lost)",
        (
            ("if", f"a node that was unreachable answers again within {NO_REBOOT:g} s"),
            ("verdict", "a network outage: no machine boots in less"),
            (
                "follows",
                "its report is withdrawn; the second time within "
                f"{WINDOW / 60:g} min it stands, with both as evidence",
            ),
        ),
    )


def _ladder() -> Iterator[str]:
    for rung in RUNGS:
        yield from _block(rung.id, (("if", rung.condition), ("then", rung.action)))
    yield from _block(BACK.rung, (("if", BACK.why), ("then", "restart in place")))
    stays = "in-place, and ranks in robust_slurm.resilient() answer within rejoin_limit"
    yield from _block(REJOIN, (("if", stays), ("then", "they keep their processes")))


def _limits(config: Config) -> Iterator[str]:
    for name in LIMITS:
        value, unit = getattr(config, name), FIELDS[name].metadata["unit"]
        if isinstance(value, bool):
            value = "on" if value else "off"
        shown = f"{value:g}" if isinstance(value, float) else str(value) or "none"
        yield f"  {name} = {shown} {unit}".rstrip()


def _block(title: str, rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield f"  {title}"
    for name, text in rows:
        yield from textwrap.wrap(
            text,
            WIDTH,
            initial_indent=f"      {name + ':':9}",
            subsequent_indent=" " * 15,
            break_on_hyphens=False,
        )
