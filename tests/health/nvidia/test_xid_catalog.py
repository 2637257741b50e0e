"""The generated catalogue: up to date, complete, and in agreement with NVIDIA's buckets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from health.finding import ACTIONS
from health.nvidia import generate_xid, xid_catalog


def test_the_catalogue_is_what_the_generator_makes() -> None:
    assert generate_xid.OUTPUT.read_text(encoding="utf-8") == generate_xid.text()
    assert generate_xid.main(["--check"]) == 0


def test_the_header_names_source_and_date() -> None:
    assert "docs.nvidia.com/deploy/xid-errors" in (xid_catalog.__doc__ or "")
    assert re.search(r"read: 20\d\d-\d\d-\d\d", xid_catalog.__doc__ or "")
    assert "GENERATED" in (xid_catalog.__doc__ or "")


def test_every_code_up_to_the_last_is_there() -> None:
    assert list(xid_catalog.XIDS) == list(range(1, 177))
    for name, meaning, bucket, _follow, linked, action, cls in xid_catalog.XIDS.values():
        assert name and meaning and bucket in generate_xid.BUCKETS
        assert action in ACTIONS and cls in generate_xid.CLASSES
        assert linked in (0, 1) or 500 < linked < 700


# Hand-picked: what must never change by an accident in the table.
@pytest.mark.parametrize(
    ("codes", "action"),
    [
        ("8 11 13 25 31 32 37 38 43 44 63 66 67 68 69 92 93 94 121 137 141 152 153 157", "none"),
        ("160 161 162 163 164 165 166 170", "none"),
        ("46 48 62 64 74 95 109 110 119 120 136 140 143 155 156 158 159 169", "reset-gpu"),
        ("79 151 167 168", "reboot"),
        ("54", "service"),
        ("45", "restart-fabric-manager"),
    ],
)
def test_actions(codes: str, action: str) -> None:
    assert {xid_catalog.XIDS[int(code)][5] for code in codes.split()} == {action}


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("xid.csv", "\n79,", "\n78,"),
        ("xid.csv", ",reboot,node,\n80", ",explode,node,\n80"),
        ("xid.csv", "RESTART_BM,support,565,reboot", "RESTART_BM,support,565,none"),
        ("nvlink5.csv", "IGNORE,-\n", "PRAY,-\n"),
        ("sxid.csv", ",non-fatal,", ",so-so,"),
    ],
)
def test_a_wrong_table_is_refused(
    file: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in generate_xid.TABLES.glob("*.csv"):
        text = path.read_text(encoding="utf-8")
        if path.name == file:
            assert old in text
            text = text.replace(old, new, 1)
        (tmp_path / path.name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(generate_xid, "TABLES", tmp_path)
    monkeypatch.setattr(generate_xid, "OUTPUT", tmp_path / "out.py")
    assert generate_xid.main([]) == 2
    assert not (tmp_path / "out.py").exists()


def test_bad_arguments_are_refused() -> None:
    assert generate_xid.main(["--force"]) == 2
