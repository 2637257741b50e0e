"""Waits for data and the figures of data processes, joined over the nodes of a job."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from made_job import Job, beat

from robust_slurm.layout import DATA_WAIT
from robust_slurm.state_dir.data_record import data_from
from srun_wrapper.job.data import SHOWN, SOURCES, JobData
from srun_wrapper.job.model import Role
from srun_wrapper.protocol.data_messages import (
    DataFigures,
    DataReport,
    SourceFigures,
    encode_report,
)
from srun_wrapper.protocol.messages import RankBeat, Report


class Heard:
    """A job whose nodes report at times that the test sets."""

    def __init__(self, active: int = 2) -> None:
        self.job = Job(active, 0)
        self.now = 1000.0
        self.data = JobData()
        self.data.new_epoch(self.now)
        self.waiting: list[tuple[str, float]] = []

    def say(self, index: int, *waiting: int, data: DataReport | None = None) -> None:
        beats = tuple(
            RankBeat(local, 1, 1, 0.0, phase=DATA_WAIT if local in waiting else "", phase_age=1.0)
            for local in (0, 1)
        )
        sent = b"" if data is None else encode_report(data)
        self.data.hear(self.job.node(index), Report(1, beats, (), sent), self.now)

    def record(self) -> dict[str, Any]:
        found = self.data.record(self.job.state.world, self.waiting, self.now)
        assert found is not None
        return found


def figures(*sources: SourceFigures, here: bool = False, ahead: int = 8) -> DataReport:
    return DataReport(0, "", DataFigures(ahead, 8, 100 + ahead, 512, here, sources))


def web(**more: Any) -> SourceFigures:
    row = {"tokens_s": 100.0, "samples_s": 1.0, "waited_s": 0.0, "silent_s": 0.0}
    return SourceFigures(**{"name": "web", **row, "read": 10, "bad": 1, **more})


def test_a_job_without_data_has_nothing_to_show() -> None:
    heard = Heard()
    for second in range(10):  # before its first step, and in another phase
        beats = beat(0, None, 0, phase=DATA_WAIT), beat(1, 1, 1, phase="eval")
        heard.data.hear(heard.job.node(0), Report(1, beats), heard.now + second)
    assert heard.data.record(heard.job.state.world, [("eval", 1.0)], heard.now) is None


def test_waits_are_of_about_the_last_minute() -> None:
    heard = Heard()

    def go_on(seconds: int, *waiting: int) -> None:
        for _ in range(4 * seconds):
            heard.now += 0.25
            heard.say(0, *waiting)
            heard.say(1)

    go_on(10, 0)
    assert {**heard.record(), "most_waited": []} == {
        **heard.record(), "window_s": 10.0, "waited_ranks": 1, "waited_s": pytest.approx(2.4, 0.1),
        "ranks": 4, "waiting_ranks": 0, "most_waited": [],
    }  # fmt: skip
    (most,) = heard.record()["most_waited"]
    assert most["rank"] == 0 and most["node"] == "n0" and most["seconds"] == pytest.approx(9.8, 0.1)
    go_on(60, 0, 1)
    assert heard.record()["waited_ranks"] == 2
    assert heard.record()["waited_s"] == pytest.approx(30, 0.1) and heard.record()["window_s"] == 60
    go_on(30)
    assert 10 < heard.record()["waited_s"] < 20
    heard.waiting = [(DATA_WAIT, heard.now - 7.0), ("save", 1.0), (DATA_WAIT, heard.now - 3.0)]
    assert (heard.record()["waiting_ranks"], heard.record()["waiting_s"]) == (2, 7.0)
    heard.waiting = []
    go_on(90)
    assert heard.data.record(heard.job.state.world, [], heard.now) is None
    heard.now += 500.0  # nothing was heard
    heard.say(0, 1)
    assert heard.record()["most_waited"][0]["seconds"] == 5.0
    heard.data.new_epoch(heard.now)
    assert heard.data.record(heard.job.state.world, [], heard.now) is None


@pytest.mark.parametrize(
    ("first", "second", "row"),
    [
        # each node reads lanes of its own: what they have read is added up, their rates are equal
        (figures(web()), figures(web(read=5, bad=2)), {"read": 15, "skipped": 3, "tokens_s": 100}),
        (figures(web(), here=True), figures(web(read=12), here=True), {"read": 12, "skipped": 1}),
        (figures(web(waited_s=3.0)), figures(web(silent_s=4.0)), {"waited_s": 3, "silent_s": 4}),
        (figures(web(tokens_s=90.0)), figures(), {"tokens_s": 90, "read": 10}),
        (figures(web()), DataReport(), {"tokens_s": 100, "read": 10}),
    ],
)
def test_sources_of_all_nodes(first: DataReport, second: DataReport, row: dict[str, float]) -> None:
    heard = Heard()
    heard.say(0, data=first)
    heard.say(1, data=second)
    heard.say(1)  # no news
    (found,) = heard.record()["sources"]
    assert found["name"] == "web" and {key: found[key] for key in row} == row


def test_processes_of_all_nodes() -> None:
    heard = Heard(3)
    heard.say(0, data=figures(web(name="b"), web(name="", silent_s=9.0), ahead=2))
    heard.say(1, data=DataReport(5, "it has ended 5 times"))
    heard.say(2, data=figures(web(name="a"), web(name="c", waited_s=0.5)))
    found = heard.record()
    assert [each["name"] for each in found["sources"]] == ["c", "a", "b", ""]
    names = ("nodes", "processes", "off_nodes", "off", "deaths", "ahead_least", "ahead")
    assert [found[name] for name in names] == [3, 2, 1, ["n1: it has ended 5 times"], 5, 2, 5.0]
    assert (found["held_bytes"], found["memory_bytes"], found["most_ahead"]) == (108, 512, 8)
    heard.job.state.members.move(heard.job.node(1), Role.DEAD)
    assert (heard.record()["nodes"], heard.record()["off"]) == (2, [])


def test_hostile_nodes_cannot_make_it_grow() -> None:
    heard = Heard()
    beats = tuple(beat(local, 1, 1, phase=DATA_WAIT) for local in range(-50, 20_000))
    for _ in range(5):
        heard.now += 1.0
        heard.data.hear(heard.job.node(0), Report(1, beats), heard.now)
    rows = tuple(web(name=f"\x1b[31m{number}") for number in range(21))
    for number in range(300):
        heard.say(0, data=figures(*rows))
        names = tuple(web(name=f"{number}-{row}", silent_s=1e15) for row in range(21))
        heard.say(1, data=DataReport(1 << 53, "x" * 300, figures(*names).figures))
    found = heard.record()
    nan = encode_report(figures(web(tokens_s=float("nan"))))
    for wrong in (b"\x00", b"\xc1", b"\xff" * 99, b"x" * (1 << 20), nan, b"\x91" * 9999):
        heard.data.hear(heard.job.node(1), Report(1, (), (), wrong), heard.now)
    assert heard.record() == found
    assert len(heard.data._waited) <= 1024 and len(found["most_waited"]) == SHOWN
    assert len(found["sources"]) == min(SOURCES, 42)
    text = json.dumps(found)
    assert len(text) < 20_000
    read = data_from(json.loads(text))
    assert read is not None and "\x1b" not in "".join(source.name for source in read.sources)


def test_ten_thousand_nodes_are_joined_quickly() -> None:
    job = Job(1, 0)
    world, data = job.state.world, JobData()
    data.new_epoch(990.0)
    node = job.node(0)
    made = [
        type(node)(**{name: getattr(node, name) for name in node.__slots__}) for _ in range(10_000)
    ]
    world.places, world.ranks = made, [(n,) for n in range(10_000)]
    rows = tuple(web(name=f"s{number}", waited_s=0.5 * (number < 3)) for number in range(21))
    report = Report(1, (beat(0, 1, 1, phase=DATA_WAIT),), (), encode_report(figures(*rows)))
    for now in (1000.0, 1005.0):
        for each in made:
            data.hear(each, report, now)
    began = time.process_time()
    found = data.record(world, [], 1005.0)
    took = time.process_time() - began
    assert took < 3.0, "a moment of a machine that does other things, too"
    print("s to join the figures of 10,000 nodes:", took)
    assert found is not None and found["waited_s"] == 5.0 and found["nodes"] == 10_000
