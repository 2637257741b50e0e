"""Bad nodes or a shared cause: the rules as a table, and whole outages over time."""

from __future__ import annotations

import pytest

from srun_wrapper.decide.shared_cause import AFTERMATH, Kind, SharedCauses, Silence, Verdict, shared

OWN = "n1"
LIMITS: dict[Kind, float] = {"unreachable": 10.0, "mute": 600.0}
TICK = 0.1
PROBE = 0.75


def names(*numbers: int) -> list[str]:
    return [f"n{number}" for number in numbers]


@pytest.mark.parametrize(
    ("kind", "silent", "nodes", "own", "elsewhere", "is_shared"),
    [
        ("unreachable", [2], 16, OWN, 0.0, False),
        ("unreachable", [2, 3], 16, OWN, 0.0, False),
        ("unreachable", [2, 3, 4], 16, OWN, 0.0, True),
        ("unreachable", range(2, 62), 1200, OWN, 0.0, False),  # 60 are 5 %
        ("unreachable", range(2, 63), 1200, OWN, 0.0, True),
        ("unreachable", [1], 16, OWN, 0.0, True),  # the supervisor's own
        ("unreachable", [1], 1, OWN, 0.0, True),
        # robust-srun runs, and hears the others: only its node's robust-task hangs.
        ("mute", [1], 16, OWN, 0.0, False),
        ("mute", [1], 2, OWN, 0.0, False),
        ("mute", [1], 1, OWN, 0.0, True),
        ("mute", [1, 2], 16, OWN, 0.0, True),
        # Two nodes: the other one is silent. Does any other host answer since?
        ("unreachable", [2], 2, OWN, 0.0, True),
        ("unreachable", [2], 2, OWN, 99.0, True),  # not since
        ("unreachable", [2], 2, OWN, 100.5, False),
        # Every node but robust-srun's, and more than one: a switch, then, or its link to them.
        ("unreachable", [2, 3], 3, OWN, 0.0, True),
        ("unreachable", [2, 3], 3, OWN, 100.5, True),
        ("unreachable", [2, 3, 4], 4, OWN, 100.5, True),
        # robust-srun's host runs no ranks.
        ("unreachable", [2, 3], 2, None, 0.0, True),
        ("unreachable", [2, 3], 2, None, 100.5, True),
        ("unreachable", [2], 1, None, 100.5, False),
        ("unreachable", [2], 3, None, 0.0, False),
        # Mute nodes: the links are well.
        ("mute", [2], 2, OWN, 0.0, False),
        ("mute", [2, 3], 3, OWN, 100.5, True),
        ("mute", [2, 3], 4, OWN, 100.5, False),
        ("mute", [2, 3, 4], 5, OWN, 100.5, True),
        ("mute", [], 2, OWN, 0.0, False),
    ],
)
def test_the_rule(
    kind: Kind,
    silent: list[int],
    nodes: int,
    own: str | None,
    elsewhere: float,
    is_shared: bool,
) -> None:
    """``elsewhere``: when another host answered; the last words were at 100."""
    first = 1 if own else 2  # n1 is robust-srun's, whether it has ranks or not
    found = {name: Silence(kind, 100.0, 101.0) for name in names(*silent)}
    job = names(*range(first, first + nodes))
    assert bool(shared(found, job, own, elsewhere)) is is_shared


def play(
    silences: dict[str, tuple[float, float]],
    nodes: int,
    until: float,
    elsewhere: bool = True,
    kind: Kind = "unreachable",
) -> dict[str, tuple[Verdict, float]]:
    """Probe the nodes again and again; each one's final verdict and its time.

    ``silences``: node → from when to when it does not answer.
    """
    causes, out = SharedCauses[str](LIMITS), dict[str, tuple[Verdict, float]]()
    job, ticks = names(*range(1, nodes + 1)), round(until / TICK)
    for now in (tick * TICK for tick in range(ticks)):
        silent = {}
        for name, (begin, end) in silences.items():
            if name in out or not begin + 0.6 <= now < end:
                continue
            asked = begin + 0.5 + PROBE * ((now - begin - 0.5) // PROBE - 1)
            proven = asked if asked >= begin + 0.5 else None
            silent[name] = Silence(kind, begin, proven)
        left = [name for name in job if name not in out]
        verdicts = causes.judge(now, silent, left, OWN, now if elsewhere else 0.0)
        out |= {n: (v, now) for n, v in verdicts.items() if v != "wait"}
    assert not causes.events
    return out


FOREVER = 1e9


def test_one_node_is_lost_as_soon_as_it_is_proven() -> None:
    (lost,) = play({"n5": (1.0, FOREVER)}, 16, 5.0).values()
    assert lost[0] == "lost" and lost[1] < 1.0 + 0.5 + PROBE + 2 * TICK


def test_an_outage_that_ends_in_time_costs_nobody() -> None:
    every = {name: (1.0 + 0.01 * i, 9.0) for i, name in enumerate(names(*range(2, 17)))}
    assert play(every, 16, 30.0) == {}


def test_a_dead_switch_of_8_of_16_nodes_is_waited_for_and_then_replaced() -> None:
    gone = {name: (1.0 + 0.02 * i, FOREVER) for i, name in enumerate(names(*range(9, 17)))}
    found = play(gone, 16, 30.0)
    assert found.keys() == gone.keys()
    for verdict, at in found.values():
        assert verdict == "replace" and 11.0 <= at < 11.0 + 2.0


@pytest.mark.parametrize("dead", [1, 2])
def test_what_stays_gone_when_the_others_are_back_is_lost(dead: int) -> None:
    gone = dict.fromkeys(names(*range(2, 17)), (1.0, 4.0))
    gone |= dict.fromkeys(names(*range(2, 2 + dead)), (1.0, FOREVER))
    found = play(gone, 16, 30.0)
    assert sorted(found) == names(*range(2, 2 + dead))
    for verdict, at in found.values():
        assert verdict == "lost" and at < 4.0 + AFTERMATH + 2 * PROBE + 2 * TICK


def test_a_switch_whose_ports_come_back_one_by_one_costs_nobody() -> None:
    gone = {f"n{i}": (1.0, 3.0 + 1.9 * (i - 2)) for i in range(2, 6)}
    assert play(gone, 16, 30.0) == {}


def test_the_only_other_node_with_no_other_host_to_ask() -> None:
    (found,) = play({"n2": (1.0, FOREVER)}, 2, 30.0, elsewhere=False).values()
    assert found[0] == "replace" and 11.0 <= found[1] < 13.0
    (found,) = play({"n2": (1.0, FOREVER)}, 2, 30.0).values()
    assert found[0] == "lost" and found[1] < 2.6


def test_both_other_nodes_of_three_are_waited_for_though_other_hosts_answer() -> None:
    assert play(dict.fromkeys(names(2, 3), (1.0, 4.0)), 3, 30.0) == {}
    found = play(dict.fromkeys(names(2, 3), (1.0, FOREVER)), 3, 30.0)
    assert sorted(found) == names(2, 3)
    for verdict, at in found.values():
        assert verdict == "replace" and 11.0 <= at < 13.0
    found = play({"n2": (1.0, 4.0), "n3": (1.0, FOREVER)}, 3, 30.0)
    assert found["n3"][0] == "lost" and found["n3"][1] < 4.0 + AFTERMATH + 2 * PROBE + 2 * TICK


def test_mute_nodes_are_waited_for_much_longer() -> None:
    stalled = dict.fromkeys(names(*range(1, 5)), (1.0, 300.0))
    assert play(stalled, 4, 400.0, kind="mute") == {}
    stuck = dict.fromkeys(names(*range(1, 5)), (1.0, FOREVER))
    found = play(stuck, 4, 700.0, kind="mute")
    assert {verdict for verdict, _ in found.values()} == {"replace"} and len(found) == 4
    assert all(601.0 <= at < 603.0 for _, at in found.values())  # from when they were noticed


def test_who_slept_begins_anew() -> None:
    causes = SharedCauses[str](LIMITS)
    silent = {name: Silence("unreachable", 0.0, 0.5) for name in names(2, 3, 4)}
    job = names(1, 2, 3, 4)
    assert set(causes.judge(2.0, silent, job, OWN, 0.0).values()) == {"wait"}
    causes.slept(60.0)
    assert set(causes.judge(69.0, silent, job, OWN, 0.0).values()) == {"wait"}
    assert set(causes.judge(70.0, silent, job, OWN, 0.0).values()) == {"replace"}
