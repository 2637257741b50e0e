"""Figures of a data process: what its steps take of each source, and the file for robust-task."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from memory_source import MemoryFeed, MemorySource, memory_feeds
from waiting import until

from robust_slurm.data.engine import Engine
from robust_slurm.data.errors import DataError, SourceStalled
from robust_slurm.data.lanes import use as source_use
from robust_slurm.data.lanes.use import SourceUse, Used
from robust_slurm.data.plan import Plan
from robust_slurm.data.planning.state import first_state
from robust_slurm.data.sample import Meta, Ref
from robust_slurm.data.service import figures
from robust_slurm.data.service.figures import MOST, WINDOW, FiguresFile
from robust_slurm.data.service.ring import Level, StepRing
from srun_wrapper.protocol.data_messages import SOURCES, decode_figures


class Clock:
    """The time, as a test sets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(source_use.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def draw(use: SourceUse, source: str, lengths: list[int]) -> None:
    use.drew(Meta(Ref(source, 0, 0, 0, number), size) for number, size in enumerate(lengths))


def made(use: SourceUse, read: dict[str, tuple[int, int]], path: str = "") -> FiguresFile:
    return FiguresFile(path, lambda: Level(3, 8, 100, 512), use, lambda: (True, read))


def test_rates_and_waits_are_of_the_last_minute(clock: Clock) -> None:
    use = SourceUse()
    file = made(use, {"web": (50, 2)})
    assert file.now(clock.now) == [3, 8, 100, 512, True, [["web", 0, 0, 0, 0, 50, 2]], 0]
    for second in range(100):
        draw(use, "web", [10, 20])
        if second == 60:
            use.waits("web")
        clock.now += 1.0
        if second == 63:
            use.got()
        if second == 97:
            use.waits("code")
        rows = file.now(clock.now)[5]
    web, code = rows[1], rows[0]
    assert web == ["web", 30.0, 2.0, 4.0, 0.0, 50, 2]
    assert code == ["code", 0.0, 0.0, 2.0, 2.0, 0, 0]  # it comes first: steps wait for it
    assert len(file._past) <= WINDOW + 2
    use.waits("code")  # asked again, after its patience is over: the same wait
    assert use.silent() == ("code", 2.0)
    use.gives_up()
    assert use.silent() == ("", 0.0) and file.now(clock.now)[5][0][3:5] == [4.0, 0.0]
    use.waits("code")
    clock.now += 300.0
    use.waits("web")  # the step goes on without code, which it did wait for
    use.got()
    assert use.sums()["code"].waited == 302.0 and use.sums()["web"].waited == 4.0


def test_many_sources_are_few_rows(clock: Clock) -> None:
    use, read = SourceUse(), {f"s{n}" * 60: (10, n) for n in range(MOST + 5)}
    content = file_content(made(use, read), clock.now)
    found = decode_figures(json.dumps(content))
    assert len(found.sources) == SOURCES == MOST + 1 and found.others == 5
    assert found.sources[0].bad == MOST + 4 and found.sources[-1].name == ""
    assert found.sources[-1].read == 50 and found.sources[-1].bad == 0 + 1 + 2 + 3 + 4


def file_content(file: FiguresFile, at: float) -> Any:
    return file.now(at)


class Failing(MemoryFeed):
    """A feed that raises what it is given."""

    error: Exception | None = None

    def next(self) -> Any:
        if self.error is not None:
            raise self.error
        return super().next()


def test_an_engine_counts_what_its_steps_take() -> None:
    plan = Plan({"a": MemorySource("a", [[3] * 40]), "b": MemorySource("b", [[5] * 40])}, pack=30)
    feeds, use = {**memory_feeds(plan)}, SourceUse()
    feeds["a", 0] = bad = Failing(plan, "a", 0)
    engine = Engine(plan, feeds, [0], 2, use=use)
    engine.seek(first_state(plan.lanes()))
    for _ in range(3):
        engine.next()
    sums = use.sums()
    assert set(sums) == {"a", "b"} and use.silent()[0] == ""
    for name, each in (("a", 3), ("b", 5)):
        assert sums[name].samples > 5 and sums[name].tokens == each * sums[name].samples
        assert 0.0 < sums[name].waited < 20.0
    for error, asked in ((DataError("x"), ""), (SourceStalled("y"), "a")):
        bad.error = error
        with pytest.raises(type(error)):
            for _ in range(9):
                engine.next()
        assert use.silent()[0] == asked
    bad.error = None
    engine.next()
    assert use.silent()[0] == ""


def test_the_file_is_replaced_and_a_process_without_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "EVERY", 0.01)
    path = tmp_path / "data-1.json"
    use = SourceUse()
    made(use, {"web": (1, 0)}, str(path)).begin()
    until(path.exists, "the first figures")
    draw(use, "web", [7])
    until(lambda: decode_figures(path.read_bytes()).sources[0].tokens_s > 0, "the next")
    assert [each.name for each in tmp_path.iterdir() if each.suffix == ".json"] == [path.name]
    made(use, {}, str(tmp_path / "none" / "data-1.json")).begin()
    names = [thread.name for thread in threading.enumerate()]
    until(lambda: "data-figures" in names, "a thread")  # the first one's: the other has ended


def test_the_level_of_a_ring() -> None:
    assert StepRing(memory=100).level() == Level(0, 8, 0, 100)
    assert Used(1, 2, 0.5).tokens == 2
