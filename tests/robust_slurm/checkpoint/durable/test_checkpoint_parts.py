"""Files beside the data of a durable step: parts and manifests, and how they are read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_steps import a_step, entry, part

from robust_slurm.checkpoint.durable import tier
from robust_slurm.checkpoint.durable.files import (
    DurableError,
    digest_inside,
    digest_of,
    is_plain_name,
    open_inside,
    read_inside,
    write_whole,
)
from robust_slurm.checkpoint.durable.parts import encode_part, parse_part

STDLIB_MODULES = (
    "durable.tier", "durable.files", "durable.parts", "durable.merge", "durable.prune",
    "durable.verify", "listing", "listing_render", "cli",
)  # fmt: skip


def test_the_tools_need_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n" + "".join(
        f"import robust_slurm.checkpoint.{name}\n" for name in STDLIB_MODULES
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_part_survives_being_written() -> None:
    made = part(
        1, [entry("model.w", (3, 2), "block", whole=(6, 2), at=(3, 0)), entry("s", ())],
        mesh={"dp": 2}, plain=["optimizer.param_groups.0.lr"],
        groups=[("optimizer.param_groups.0", ("w",))],
    )._replace(paths={"model.w": ("model", "w", 3)})  # fmt: skip
    assert parse_part(encode_part(made)) == made


def lines_of(made: Any) -> list[Any]:
    """Head, contents, places, values and form of an encoded part, decoded."""
    *texts, form = encode_part(made).split(b"\n", 4)
    return [*map(json.loads, texts), json.loads(zlib.decompress(form))]


def raw_of(lines: list[Any]) -> bytes:
    *rest, form = (json.dumps(line).encode() for line in lines)
    return b"\n".join([*rest, zlib.compress(form)])


def change(path: Sequence[str | int], value: Any) -> Any:
    return pytest.param(path, value, id=".".join(map(str, path)) + f"={value!r}"[:30])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        change([0, "version"], 3),
        change([0, "attempt"], "../x"),
        change([0, "attempt"], "__0"),
        change([0, "rank"], -1),
        change([0, "files", 0, 0], "../../etc/passwd"),
        change([0, "files", 0, 0], "a/b"),
        change([0, "files", 0, 1], -1),
        change([0, "files", 0, 1], True),
        change([0, "files", 0, 1], 0),
        change([0, "offsets"], []),
        change([0, "offsets"], [-1]),
        change([0, "offsets"], [6]),
        change([0, "offsets"], [0.5]),
        change([0, "offsets"], [1 << 70]),
        change([1], ["a", "b"]),
        change([1], [1, 2]),
        change([2], [1, 0, 40, 0, 0, 900]),
        change([2], [0, 999, 40, 0, 0, 900]),
        change([2], [0, 0, 19, 0, 0, 900]),
        change([2], []),
        change([4, "entries", 0, 1], "pickle"),
        change([4, "entries", 0, 2], [1 << 70]),
        change([4, "entries", 0, 2], [11]),
        change([4, "entries", 0, 4], [10, 10]),
        change([4, "paths"], {"model.w": []}),
        change([4], None),
        change([0], None),
    ],
)
def test_a_part_that_cannot_be_ours_is_refused(path: Sequence[str | int], value: Any) -> None:
    made = part(0, [entry("w", (5,), "block", whole=(10,), at=(5,)), entry("model.w", (10,))])
    lines = lines_of(made)
    assert parse_part(raw_of(lines)) == made
    at: Any = lines
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(ValueError):
        parse_part(raw_of(lines))


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_a_part_cut_off_is_refused(cut: int) -> None:
    raw = encode_part(part(0, [entry("w", (5,))]))
    for torn in (b"\n".join(raw.split(b"\n", 4)[:cut]), raw[:-cut]):
        with pytest.raises(ValueError):
            parse_part(torn)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
        max_leaves=10,
    )
)
def test_arbitrary_json_is_neither_a_part_nor_a_manifest(data: Any) -> None:
    raw = json.dumps(data).encode()
    for parse in (parse_part, tier.parse_manifest):
        with pytest.raises(ValueError):
            parse(raw)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"version":1}'])
def test_broken_json_is_a_value_error(raw: bytes) -> None:
    for parse in (parse_part, tier.parse_manifest):
        with pytest.raises(ValueError):
            parse(raw)


def test_a_manifest_needs_every_rank_once(tmp_path: Path) -> None:
    where = a_step(tmp_path, 1)
    data = json.loads((where / "manifest.json").read_bytes())
    for parts in (data["parts"][:1], data["parts"][::-1], [data["parts"][0]] * 2):
        with pytest.raises(ValueError, match="rank"):
            tier.parse_manifest(json.dumps({**data, "parts": parts}).encode())


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/x", "a\0b", "a\n", "-x", "..x", "x" * 300]
)
def test_names_that_lead_elsewhere(name: str, tmp_path: Path) -> None:
    assert not is_plain_name(name)
    with pytest.raises(OSError):
        open_inside(tmp_path, name)


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "in" / "link").symlink_to("../secret")
    (tmp_path / "dir").symlink_to("in")
    (tmp_path / "in" / "file").write_text("x")
    with pytest.raises(OSError):
        read_inside(tmp_path / "in", "link", 100)
    with pytest.raises(OSError):
        read_inside(tmp_path / "dir", "file", 100)


def test_a_pipe_does_not_hang_and_large_files_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="regular"):
        read_inside(tmp_path, "pipe", 10)
    (tmp_path / "file").write_bytes(bytes(11))
    with pytest.raises(DurableError, match="larger"):
        read_inside(tmp_path, "file", 10)


def test_write_whole_replaces(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_whole(path, b"one")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_both_digests_agree(tmp_path: Path) -> None:
    raw = os.urandom(100_000)
    (tmp_path / "x").write_bytes(raw)
    assert digest_inside(tmp_path, "x") == (len(raw), digest_of(raw))
