"""An agent's conclusions from a silent supervisor."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_slurm.settings import AFTER_SUPERVISOR, Config
from srun_wrapper.agent.connections.silence import (
    DEAD_IN_THE_END,
    DEAD_SUPERVISOR,
    START,
    Contact,
    SilenceVerdict,
    judge_silence,
)

LOST_HOST, MUTE = Config().outage_wait + AFTER_SUPERVISOR, Config().suspend_limit
FINE, DEAD, HOST = SilenceVerdict.FINE, SilenceVerdict.SUPERVISOR_DEAD, SilenceVerdict.HOST_LOST


def attempt(contact: Contact, kind: str, now: float) -> None:
    if kind == "heard":
        contact.heard(now)
    elif kind == "slept":
        contact.slept(now)
    elif kind == "signalled":
        contact.ending = True
    else:
        contact.lost(now, refused=kind == "refused", accepted=kind == "accepted", begun=now)


def judge(contact: Contact, now: float, mute: float = MUTE, first: float = START) -> SilenceVerdict:
    return judge_silence(contact, now, LOST_HOST, mute, first)


@pytest.mark.parametrize(
    ("history", "now", "verdict"),
    [
        ([("heard", 10.0), ("refused", 11.0), ("slept", 40.0)], 40.0 + DEAD_SUPERVISOR, FINE),
        ([("heard", 10.0), ("unreachable", 11.0), ("slept", 40.0)], 40.0 + LOST_HOST, FINE),
        ([("heard", 10.0), ("slept", 700.0)], 700.0 + MUTE - 1, FINE),
        ([], START - 0.1, FINE),
        ([], START, DEAD),
        ([("refused", 1.0)], 50.0, FINE),  # not started yet: START decides
        ([("heard", 10.0)], 10.0 + MUTE - 1, FINE),
        ([("heard", 10.0)], 10.0 + MUTE, DEAD),
        ([("heard", 10.0), ("refused", 11.0)], 11.0 + DEAD_SUPERVISOR - 0.1, FINE),
        ([("heard", 10.0), ("refused", 11.0)], 11.0 + DEAD_SUPERVISOR, DEAD),
        ([("heard", 10.0), ("refused", 11.0), ("refused", 15.0)], 16.0, DEAD),
        ([("heard", 10.0), ("refused", 11.0), ("signalled", 13.0)], 13.0, DEAD),
        ([("heard", 10.0), ("signalled", 10.5), ("refused", 11.0)], 11.0, FINE),
        ([("heard", 10.0), ("signalled", 10.5), ("refused", 11.0)], 11.0 + DEAD_IN_THE_END, DEAD),
        ([("refused", 1.0), ("signalled", 2.0)], 2.0, DEAD),  # it never came to life
        ([("heard", 10.0), ("signalled", 11.0)], 10.0 + MUTE - 1, FINE),
        ([("heard", 10.0), ("signalled", 11.0), ("unreachable", 12.0)], 10.0 + LOST_HOST - 1, FINE),
        ([("heard", 10.0), ("refused", 11.0), ("heard", 12.0)], 30.0, FINE),
        ([("heard", 10.0), ("refused", 11.0), ("accepted", 12.0)], 30.0, FINE),
        ([("heard", 10.0), ("unreachable", 12.5)], 10.0 + LOST_HOST - 0.1, FINE),
        # An attempt begun before the end of an outage says nothing about now.
        ([("heard", 10.0), ("unreachable", 12.5)], 10.0 + LOST_HOST, FINE),
        ([("heard", 10.0), *[("unreachable", at) for at in (12.5, 10.0 + LOST_HOST)]], 26.0, HOST),
        ([("heard", 10.0), ("unreachable", 12.0), ("accepted", 13.0)], 40.0, FINE),
        ([("heard", 10.0), ("unreachable", 12.0), ("refused", 13.0)], 17.9, FINE),
        ([("heard", 10.0), ("unreachable", 12.0), ("refused", 13.0)], 18.0, DEAD),
    ],
)
def test_verdicts(history: list[tuple[str, float]], now: float, verdict: SilenceVerdict) -> None:
    contact = Contact(since=0.0)
    for kind, at in history:
        attempt(contact, kind, at)
    assert judge(contact, now) is verdict


def test_a_site_may_be_more_or_less_patient_with_a_suspended_robust_srun() -> None:
    contact = Contact(since=0.0)
    contact.heard(10.0)
    assert judge(contact, 10.0 + 29, mute=30.0) is FINE
    assert judge(contact, 10.0 + 30, mute=30.0) is DEAD
    assert judge(contact, 10.0 + MUTE, mute=2 * MUTE) is FINE


def test_the_first_contact_may_take_as_long_as_the_start_of_all_tasks() -> None:
    """With a larger task_start_limit the nodes gave robust-srun up before they had tried."""
    contact = Contact(since=0.0)
    assert judge(contact, START + 1, first=600.0) is FINE
    assert judge(contact, 600.0, first=600.0) is DEAD


KINDS = st.sampled_from(["heard", "refused", "unreachable", "accepted"])


@settings(deadline=None)
@given(st.lists(st.tuples(KINDS, st.floats(0.01, 3.0)), max_size=40), st.floats(0.0, LOST_HOST / 2))
def test_recent_words_are_always_fine(events: list[tuple[str, float]], later: float) -> None:
    """A message less than LOST_HOST ago rules out every bad verdict, after any history."""
    contact, now = Contact(since=100.0), 100.0
    for kind, gap in events:
        now += gap
        attempt(contact, kind, now)
    contact.heard(now)
    assert judge(contact, now + later) is FINE


@settings(deadline=None)
@given(st.lists(st.tuples(KINDS, st.floats(0.01, 3.0)), max_size=40))
def test_a_host_that_answers_is_never_lost(events: list[tuple[str, float]]) -> None:
    contact, now = Contact(since=100.0), 100.0
    for kind, gap in events:
        now += gap
        attempt(contact, kind, now)
        if kind != "unreachable":
            assert judge(contact, now) is not HOST
