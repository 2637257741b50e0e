"""A watch with a defect does not end the job."""

from __future__ import annotations

from srun_wrapper.detect.guard import WatchGuard


def test_a_failing_watch_silences_no_other() -> None:
    said, looked = list[str](), list[float]()
    guard = WatchGuard(said.append)

    def fails(_now: float) -> None:
        raise KeyError("n1")

    for now in (1.0, 2.0):
        for each in (fails, looked.append):
            guard.call(each, now)
    assert looked == [1.0, 2.0]
    assert len(said) == 1 and "fails: KeyError: 'n1'" in said[0]
