"""The first loss that is not finite stays in the record, with the newest state that is proven."""

from __future__ import annotations

from pathlib import Path

import pytest
from beating_rank import read, run

# What a training does: resume() gave 4; ``b`` a beat with a loss, ``x`` one with NaN, ``-`` one
# without a loss, ``s`` a save. Beats and saves are numbered as the first two columns say.
PLAY = """
from robust_slurm import heartbeat as h
h._expect_saves(); h._resumed_step(4)
beats, saves = {first_beat} - 1, {first_save} - 1
for what in {story!r}:
    if what == "s":
        saves += 1
        if not h._nan: h._saved_step(saves)   # as Checkpointer.save does
    else:
        beats += 1
        if what == "-": r.beat(beats)
        else: r.beat(beats, loss={{"b": 1.5, "x": float("nan"), "i": -float("inf")}}[what])
"""


@pytest.mark.parametrize(
    ("first_beat", "first_save", "story", "step", "proven"),
    [
        # for step in range(4, …): beat(step, loss); save(step + 1)
        (4, 5, "bsbsbsxs", 7, 6),  # the loss of state 6 was finite, that of 7 was not
        (4, 5, "bsbsbsxsxsxs", 7, 6),
        (4, 5, "bsbsis", 6, 5),
        (4, 5, "xs", 4, 3),  # state 4, just resumed, may be what is bad
        (4, 5, "bsxs", 5, 4),
        # for step in range(5, …): beat(step, loss); save(step)
        (5, 5, "bsbsbsxs", 8, 6),
        # save before beat: a loss is older than the newest saved state
        (4, 5, "sbsbsbsx", 7, 6),
        (5, 5, "sbsbsbsx", 8, 6),
        (4, 5, "sx", 4, 3),
        # losses now and then
        (4, 5, "bs-s-s-sxs", 8, 4),
        (4, 5, "-s-s-sbs-s-sxs", 10, 7),
        # it went away by itself: nothing is left of it
        (4, 5, "bsxsxsbsbs", None, None),
        (4, 5, "bsxsbsbsxs", 8, 7),
        (4, 5, "bs-s-s", None, None),
    ],
)
def test_story(
    tmp_path: Path,
    first_beat: int,
    first_save: int,
    story: str,
    step: int | None,
    proven: int | None,
) -> None:
    run(PLAY.format(first_beat=first_beat, first_save=first_save, story=story), tmp_path)
    beat = read(tmp_path)
    if step is None:
        assert beat.nan is None
    else:
        assert beat.nan is not None
        assert (beat.nan.step, beat.nan.proven) == (step, proven)


@pytest.mark.parametrize(
    ("first_save", "story", "proven"),
    [
        # A save tells what was proven before it.
        (5, "bs", 4),
        (5, "bsbsbs", 6),
        (5, "bsb", 4),
        (5, "bsbsxsxs", 5),
        (5, "sbsbsbs", 6),
        # A rank that tells no losses proves nothing, and neither does one whose first is NaN.
        (5, "-s-s-s", None),
        (5, "xs", None),
        (5, "bs-s-s", 4),
    ],
)
def test_what_is_proven_while_losses_are_finite(
    tmp_path: Path, first_save: int, story: str, proven: int | None
) -> None:
    run(PLAY.format(first_beat=4, first_save=first_save, story=story), tmp_path)
    assert read(tmp_path).proven == proven


@pytest.mark.slow
@pytest.mark.parametrize(
    ("story", "sound", "healed"),
    [
        ("bbx", 6, False),  # steps 5, 6 and 7
        ("bbxxx-", 6, False),
        ("x", None, False),  # the first beat: nothing is known of the step before
        ("bb-x", None, False),  # losses now and then
        ("bxb", None, True),
        ("bxbbx", 8, False),
        ("bb", None, False),
    ],
)
def test_the_newest_step_with_a_finite_loss(
    tmp_path: Path, story: str, sound: int | None, healed: bool
) -> None:
    run(PLAY.format(first_beat=5, first_save=5, story=story), tmp_path)
    beat = read(tmp_path)
    assert (beat.sound, beat.healed) == (sound, healed)


def test_without_a_checkpointer_nothing_is_known_of_states(tmp_path: Path) -> None:
    run("r.beat(3, loss=1.0); r.beat(4, loss=float('inf')); r.beat(5)", tmp_path)
    beat = read(tmp_path)
    assert beat.nan == (4, float("inf"), None)
    assert (beat.step, beat.loss) == (5, None)


def test_a_step_beyond_64_bits(tmp_path: Path) -> None:
    run("r.beat(1 << 70, loss=float('inf'))", tmp_path)
    assert read(tmp_path).nan == (None, float("inf"), None)


def test_ignored_where_that_is_asked_for(tmp_path: Path) -> None:
    code = (
        "from robust_slurm import heartbeat as h; r.beat(4, loss=float('nan')); assert not h._nan"
    )
    run(code, tmp_path, ROBUST_NAN="ignore")
    beat = read(tmp_path)
    assert beat.nan is None and beat.loss != beat.loss


def test_numbers_of_numpy(tmp_path: Path) -> None:
    run(
        "import numpy as np; r.beat(2, loss=np.float32('nan'), grad_norm=np.float32('inf'))",
        tmp_path,
    )
    beat = read(tmp_path)
    assert beat.nan is not None and beat.nan.step == 2
