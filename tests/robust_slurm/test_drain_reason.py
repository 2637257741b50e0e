"""Drain reasons: written, recognised, and told from reasons of others."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_slurm.drain_reason import ActionName, Class, Reason, parse_reason, without_reboot


@pytest.mark.parametrize(
    ("device", "written"),
    [
        ("/scratch", "/scratch"),
        ("0000:3b:00.0", "0000_3b_00.0"),
        ("my disk", "my_disk"),
        ("a'\"; $(x)\n", "a_x_"),
        ("ü", "_"),
        ("x" * 300, "x" * 64),
    ],
)
def test_a_device_is_one_plain_word(device: str, written: str) -> None:
    reason = Reason("node", "mount-missing", device, "none", 1)
    assert reason.text == f"robust:node:mount-missing:{written}:none:job1"


@pytest.mark.slow
@given(
    st.sampled_from(get_args(Class)),
    st.from_regex(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", fullmatch=True),
    st.text(),
    st.sampled_from(get_args(ActionName)),
    st.integers(0, 1 << 32),
)
def test_a_reason_comes_back(cls: str, check: str, device: str, action: str, job: int) -> None:
    made = Reason(cls, check, device, action, job)  # type: ignore[arg-type]
    text = made.text
    rebooted = f"{text} : reboot issued"  # as Slurm writes it at `scontrol reboot`
    signed = [f"{one} [root@2025-11-21T10:00:00]" for one in (text, rebooted)]
    for shown in (text, f" {text} ", rebooted, *signed):
        assert without_reboot(shown)[0] in (shown, text)
        parsed = parse_reason(shown)
        assert parsed is not None
        assert parsed == made._replace(device=parsed.device)
        assert parsed.text == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Prolog error",
        "robust",
        "robust:node:mount-missing:-:none",
        "robust:node:mount-missing:-:none:job",
        "robust:node:mount-missing:-:explode:job1",
        "robust:host:mount-missing:-:none:job1",
        "robust:node:mount missing:-:none:job1",
        "robust:node:mount-missing::none:job1",
        "robust:node:mount-missing:-:none:job1 and Bob is on it",
        "Bob: robust:node:mount-missing:-:none:job1",
        "robust:node:mount-missing:-:none:job1\nrobust:node:mount-missing:-:none:job1",
        "robust:node:mount-missing:-:none:job" + "9" * 30,
        "Robust:node:mount-missing:-:none:job1",
    ],
)
def test_a_reason_of_somebody_else_is_not_ours(text: str) -> None:
    assert parse_reason(text) is None


def test_the_parts_of_a_reason() -> None:
    assert parse_reason("robust:tool:clock-error:-:none:job0") == Reason(
        "tool", "clock-error", "", "none", 0
    )


@given(st.text())
def test_no_text_breaks_the_parser(text: str) -> None:
    parsed = parse_reason(text)
    assert parsed is None or text.strip().startswith("robust:")
