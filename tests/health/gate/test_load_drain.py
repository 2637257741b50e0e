"""The imports that a drain needs, made while the gate waits for its checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from health.gate import gate


@pytest.mark.parametrize(
    "text", ["def half(:", "import of_a_package_that_is_gone", "1 / 0", "\0", "raise OSError"]
)
def test_a_half_written_module_does_not_end_the_gate(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_written_module.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(gate, "_DRAIN", ("socket", "half_written_module", "traceback"))
    assert list(gate.load_drain()) == [True]


def test_the_gates_own_alarm_still_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(name: str) -> None:
        raise gate.Late(name)

    monkeypatch.setattr(gate, "import_module", late)
    with pytest.raises(gate.Late):
        list(gate.load_drain())
