"""The door's commands where slurmctld is down, slow, busy or of another release."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from recorded_slurm import ENVIRON, OK, Recorded, door, failed, node_text, said

from robust_slurm.slurm import Completed, Slurm, SlurmError

DOWN = Completed(1, "Slurmctld(primary) at head is DOWN\n", "")


@pytest.mark.parametrize(
    ("answer", "up"),
    [
        (Completed(0, "Slurmctld(primary) at head is UP\n", ""), True),
        (Completed(1, "Slurmctld(primary) at a is DOWN\nSlurmctld(backup) at b is UP\n", ""), True),
        (Completed(1, "Slurmctld(primary) at head is DOWN\n*** RESTORE ***\n", ""), False),
        (SlurmError("timeout", ("scontrol", "ping"), "no answer"), False),
    ],
)
def test_ping(answer: Completed | SlurmError, up: bool) -> None:
    slurm, _ = door({"ping": answer})
    assert slurm.ping() is up


@pytest.mark.parametrize(
    ("said", "most"),
    [("Insane message length", 0.4), ("Unexpected message received for job 5", 0.8)],
)
def test_what_explains_an_error_keeps_the_deadline(said: str, most: float) -> None:
    """The release of the commands; and if a slurmctld answers, for which a ping gets its time."""
    left: list[float] = []

    def runner(argv: Sequence[str], deadline_s: float, *more: object) -> Completed:
        if argv[1] in ("version", "ping"):
            left.append(deadline_s)
            return Completed(0, "is UP", "")
        return failed(said)

    with pytest.raises(SlurmError):
        Slurm(runner, deadline_s=0.4, environ=ENVIRON).update_job(5, requeue=True)
    assert left and left[0] <= most


def test_a_busy_controller_is_asked_once_more() -> None:
    busy = failed("slurm_load_node error: Socket timed out on send/recv operation")
    slurm, runner = door({"show node": [busy, said("22.05-nodes.txt")]})
    assert len(slurm.nodes()) == 4
    slurm, runner = door({"show node": [busy]})
    with pytest.raises(SlurmError) as caught:
        slurm.nodes()
    assert caught.value.kind == "timeout"
    assert len(runner.calls) == 2


def test_a_stray_refusal_is_no_answer() -> None:
    """24.11 and 26.05 without slurmdbd refuse a change of partition by an old errno."""
    stray = [
        failed("Resource temporarily unavailable for job 5"),
        failed("Interrupted system call for job 5"),
    ]
    slurm, runner = door({"update": [*stray, *stray, OK]})
    slurm.update_job(5, partition="train,standby")
    assert len(runner.calls) == 5
    slurm = Slurm(Recorded({"update": stray[0]}), environ=ENVIRON)
    with pytest.raises(SlurmError) as caught:
        slurm.update_job(5, partition="train,standby", within=0.5)
    assert caught.value.kind == "conflict" and "try again" in caught.value.hint


def test_a_protocol_error_names_the_release_of_the_commands() -> None:
    ours = Completed(0, "slurm 26.05.5\n", "")
    slurm, _ = door({"show node": failed("Insane message length"), "version": ours})
    with pytest.raises(SlurmError) as caught:
        slurm.nodes()
    assert caught.value.kind == "version"
    assert "Insane message length (commands: slurm 26.05.5)" in caught.value.message


@pytest.mark.parametrize(
    ("probe", "kind"),
    [
        (SlurmError("timeout", ("scontrol",), "no answer"), "unreachable"),
        (failed("Unable to contact slurm controller (connect failure)"), "unreachable"),
        (failed("Zero Bytes were transmitted or received"), "version"),  # of another release
        (failed("slurm_unpack: Incompatible versions of client and server code"), "version"),
    ],
)
def test_what_scontrol_calls_down_is_looked_at(probe: Completed | SlurmError, kind: str) -> None:
    ours = Completed(0, "slurm 26.05.5\n", "")
    runner = Recorded({"ping": DOWN, "show partition": probe, "version": ours})
    with pytest.raises(SlurmError) as caught:
        Slurm(runner, environ=ENVIRON, ping_first=True).nodes()
    assert caught.value.kind == kind
    assert ("(commands: slurm 26.05.5)" in caught.value.message) is (kind == "version")


def test_a_slurmctld_that_answers_is_up_whatever_its_ping_says() -> None:
    answers = Completed(0, "PartitionName=batch\n", "")
    runner = Recorded({"ping": DOWN, "show partition": answers, "show node": node_text("IDLE")})
    slurm = Slurm(runner, environ=ENVIRON, ping_first=True)
    assert slurm.nodes() and slurm.nodes()
    assert len(runner.calls) == 4  # one ping and one look for both


@pytest.mark.parametrize(
    ("ping", "kind"),
    [
        (SlurmError("timeout", ("scontrol", "ping"), "no answer"), None),  # slow: wait for it
        (SlurmError("other", ("scontrol", "ping"), "scontrol is not in PATH"), "other"),
        (Completed(0, "Slurmctld(primary) at head is UP\n", ""), None),
    ],
)
def test_ping_first(ping: Completed | SlurmError, kind: str | None) -> None:
    runner = Recorded({"ping": ping, "show node": node_text("IDLE")})
    slurm = Slurm(runner, environ=ENVIRON, ping_first=True)
    if kind is None:
        assert slurm.nodes() and slurm.nodes()
        assert len(runner.calls) == 3  # one ping for both
        return
    with pytest.raises(SlurmError) as caught:
        slurm.nodes()
    assert caught.value.kind == kind and len(runner.calls) == 1
