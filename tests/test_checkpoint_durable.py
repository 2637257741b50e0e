"""The durable tier's directory without torch: manifests, merging, verifying, retention."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_slurm.checkpoint import durable
from robust_slurm.checkpoint.durable_files import (
    DurableError,
    digest_inside,
    digest_of,
    is_plain_name,
    open_inside,
    read_inside,
    write_whole,
)
from robust_slurm.checkpoint.durable_merge import merge, overlap
from robust_slurm.checkpoint.durable_parts import (
    File,
    Part,
    Place,
    Plain,
    encode_part,
    parse_part,
    part_name,
)
from robust_slurm.checkpoint.durable_prune import prune
from robust_slurm.checkpoint.durable_verify import verify
from robust_slurm.checkpoint.layout import Entry, Snapshot

STDLIB_MODULES = (
    "durable", "durable_files", "durable_parts", "durable_merge", "durable_prune",
    "durable_verify", "listing", "listing_render", "cli",
)  # fmt: skip


def entry(
    fqn: str, shape: Sequence[int], kind: str = "private", *, whole: Any = None, at: Any = None
) -> Entry:
    shape = tuple(shape)
    return Entry(
        fqn, "F32", shape, fqn, tuple(whole or shape), tuple(at or (0,) * len(shape)), kind
    )


def part(
    rank: int,
    entries: Sequence[Entry],
    *,
    world: int = 2,
    needs: Sequence[int] = (),
    mesh: dict[str, int] | None = None,
    plain: Sequence[str] = (),
    groups: Sequence[tuple[str, tuple[str, ...]]] = (),
    step: int = 100,
    attempt: str = "7.e0",
) -> Part:
    snapshot = Snapshot(
        step, rank, world, 0, "7", mesh or {}, tuple(needs or [rank]), {"x": 1}, tuple(entries)
    )
    file = File(f"{attempt}-{rank}_0.distcp", 1000, [rank])
    return Part(
        attempt, snapshot, [1, 2], (file,), tuple(Place(0, i, 900) for i in range(len(entries))),
        {}, tuple(Plain(n, tuple(n.split(".")), Place(0, 0, 1)) for n in plain), tuple(groups),
    )  # fmt: skip


def a_step(directory: Path, step: int, *, world: int = 2, attempt: str = "7.e0") -> Path:
    """A committed step with data that verifies, made without torch."""
    where = durable.step_dir(directory, step)
    where.mkdir(parents=True)
    pins = []
    for rank in range(world):
        data = bytes([rank]) * 1000
        made = part(rank, [entry(f"model.w{rank}", (10,))], world=world, step=step, attempt=attempt)
        made = made._replace(files=(made.files[0]._replace(digest=digest_of(data)),))
        (where / made.files[0].name).write_bytes(data)
        raw = encode_part(made)
        name = part_name(attempt, rank)
        (where / name).write_bytes(raw)
        pins.append(durable.PartFile(rank, name, len(raw), digest_of(raw)))
    (where / ".metadata").write_bytes(b"pickle")
    manifest = durable.Manifest(
        step, attempt, world, {}, 1.7e9, 1000 * world, tuple(pins), (6, digest_of(b"pickle")), ()
    )
    (where / "manifest.json").write_bytes(durable.encode_manifest(manifest))
    return where


# ---------------------------------------------------------------- imports


def test_the_tools_need_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n" + "".join(
        f"import robust_slurm.checkpoint.{name}\n" for name in STDLIB_MODULES
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---------------------------------------------------------------- parts and manifests


def test_a_part_survives_being_written() -> None:
    made = part(
        1, [entry("model.w", (3, 2), "block", whole=(6, 2), at=(3, 0)), entry("s", ())],
        mesh={"dp": 2}, plain=["optimizer.param_groups.0.lr"],
        groups=[("optimizer.param_groups.0", ("w",))],
    )._replace(paths={"model.w": ("model", "w", 3)})  # fmt: skip
    assert parse_part(encode_part(made)) == made


def change(path: Sequence[str | int], value: Any) -> Any:
    return pytest.param(path, value, id=".".join(map(str, path)) + f"={value!r}"[:30])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        change(["version"], 2),
        change(["attempt"], "../x"),
        change(["attempt"], "__0"),
        change(["files", 0, 0], "../../etc/passwd"),
        change(["files", 0, 0], "a/b"),
        change(["files", 0, 1], -1),
        change(["files", 0, 1], True),
        change(["files", 0, 1], 0),
        change(["places", 0], [1, 0, 1]),
        change(["places", 0], [0, 999, 2]),
        change(["places", 0], [0, 0, 39]),
        change(["places"], []),
        change(["snapshot", "rank"], -1),
        change(["snapshot", "entries", 0, 1], "pickle"),
        change(["snapshot", "entries", 0, 2], [1 << 70]),
        change(["snapshot", "entries", 0, 2], [11]),
        change(["snapshot", "entries", 0, 5], [0, 0]),
        change(["paths"], {"model.w": []}),
        change(["snapshot"], None),
    ],
)
def test_a_part_that_cannot_be_ours_is_refused(path: Sequence[str | int], value: Any) -> None:
    data = json.loads(encode_part(part(0, [entry("model.w", (10,))])))
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(ValueError):
        parse_part(json.dumps(data).encode())


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
        max_leaves=10,
    )
)
def test_arbitrary_json_is_neither_a_part_nor_a_manifest(data: Any) -> None:
    raw = json.dumps(data).encode()
    for parse in (parse_part, durable.parse_manifest):
        with pytest.raises(ValueError):
            parse(raw)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"version":1}'])
def test_broken_json_is_a_value_error(raw: bytes) -> None:
    for parse in (parse_part, durable.parse_manifest):
        with pytest.raises(ValueError):
            parse(raw)


def test_a_manifest_needs_every_rank_once(tmp_path: Path) -> None:
    where = a_step(tmp_path, 1)
    data = json.loads((where / "manifest.json").read_bytes())
    for parts in (data["parts"][:1], data["parts"][::-1], [data["parts"][0]] * 2):
        with pytest.raises(ValueError, match="rank"):
            durable.parse_manifest(json.dumps({**data, "parts": parts}).encode())


# ---------------------------------------------------------------- files


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


# ---------------------------------------------------------------- merging


def names(parts: Sequence[Part]) -> dict[str, list[int]]:
    merged = merge(parts)
    assert not merged.problems
    return {t.name: [chunk.rank for chunk in t.chunks] for t in merged.tensors}


def half(fqn: str, which: int, kind: str = "shared") -> Entry:
    return entry(fqn, (5, 2), kind, whole=(10, 2), at=(5 * which, 0))


def test_row_blocks_of_peers_form_one_tensor() -> None:
    peers = [
        part(0, [half("model.w", 0), entry("model.b", (3,), "shared")], needs=[0, 1]),
        part(1, [half("model.w", 1), entry("optimizer.step", (), "shared")], needs=[0, 1]),
    ]
    assert names(peers) == {"model.w": [0, 1], "model.b": [0], "optimizer.step": [1]}


def test_private_ones_are_the_lowest_ranks_and_others_stand_aside() -> None:
    parts = [part(r, [entry("model.mean", (3,))], world=3) for r in range(3)]
    assert names(parts) == {"model.mean": [0], "model.mean@1": [1], "model.mean@2": [2]}


def test_a_suffix_never_meets_a_real_name() -> None:
    parts = [
        part(0, [entry("a", (1,)), entry("a@1", (2,))]),
        part(1, [entry("a", (1,))]),
    ]
    assert names(parts) == {"a": [0], "a@1": [0], "a@1'": [1]}


def test_stages_that_use_one_name_by_data_parallel_group() -> None:
    """dp 2 x pp 2, pp varies fastest: ranks 0 and 2 are stage 0, ranks 1 and 3 stage 1."""
    parts = [
        part(rank, [half("model.w", rank // 2)], world=4, needs=[rank % 2, rank % 2 + 2])
        for rank in range(4)
    ]
    assert names(parts) == {"model.w": [0, 2], "model.w@1": [1, 3]}


@pytest.mark.parametrize("mesh", [{}, {"dp": 2, "pp": 2}])
def test_stages_that_use_one_name_for_distributed_tensors(mesh: dict[str, int]) -> None:
    parts = [
        part(rank, [half("model.w", rank // 2, "block")], world=4, mesh=mesh) for rank in range(4)
    ]
    assert names(parts) == {"model.w": [0, 2], "model.w@1": [1, 3]}


def test_empty_shards_count_for_nothing() -> None:
    parts = [
        part(0, [entry("w", (1, 4), "block", whole=(1, 4), at=(0, 0))]),
        part(1, [entry("w", (0, 4), "block", whole=(1, 4), at=(1, 0))]),
    ]
    assert names(parts) == {"w": [0]}


def test_an_empty_tensor_is_complete() -> None:
    assert names([part(0, [entry("w", (0, 4))], world=1)]) == {"w": [0]}


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        ([(0, 5)], "not complete: 10 of 20"),
        ([(0, 5), (6, 4)], "not complete"),
        ([(0, 6), (5, 5)], "overlap"),
        ([(0, 6), (5, 4)], "overlap"),
    ],
)
def test_blocks_that_do_not_cover_a_tensor_once(blocks: list[tuple[int, int]], says: str) -> None:
    parts = [
        part(r, [entry("w", (n, 2), "block", whole=(10, 2), at=(begin, 0))], world=len(blocks))
        for r, (begin, n) in enumerate(blocks)
    ]
    (problem,) = merge(parts).problems
    assert says in problem
    assert "w" in problem


@given(st.lists(st.tuples(*[st.integers(0, 6)] * 4), max_size=8))
def test_overlap_is_what_comparing_all_pairs_says(boxes: list[tuple[int, int, int, int]]) -> None:
    blocks = [Entry("w", "F32", (h, w), "w", (20, 20), (y, x), "block") for y, x, h, w in boxes]
    cells = [{(y + i, x + j) for i in range(h) for j in range(w)} for y, x, h, w in boxes]
    apart = sum(map(len, cells)) == len(set().union(*cells)) if cells else True
    assert overlap(blocks) == (not apart)


def test_values_are_the_lowest_ranks() -> None:
    parts = [part(0, [], plain=["a"]), part(1, [], plain=["a", "b"])]
    assert {v.name: v.rank for v in merge(parts).values} == {"a": 0, "b": 1}


def test_stages_with_their_own_groups_have_values_by_parameter() -> None:
    parts = [
        part(r, [], plain=["optimizer.param_groups.0.lr", "optimizer.param_groups.0.params"],
             groups=[("optimizer.param_groups.0", (f"l{r}.w", f"l{r}.b"))])
        for r in range(2)
    ]  # fmt: skip
    found = {v.name: v.rank for v in merge(parts).values}
    assert found["optimizer.param_groups.0.lr"] == 0
    assert found["optimizer.param_groups.l0.w.lr"] == 0
    assert found["optimizer.param_groups.l1.b.lr"] == 1
    assert not any(name.endswith("b.params") for name in found)
    alike = [p._replace(groups=parts[0].groups) for p in parts]
    assert len(merge(alike).values) == 2


# ---------------------------------------------------------------- committed, newest


def test_what_is_committed(tmp_path: Path) -> None:
    assert durable.committed(tmp_path / "absent") == []
    assert durable.newest(tmp_path / "absent") is None
    for step in (5, 123456789, 20):
        a_step(tmp_path, step)
    (tmp_path / "step-00000030").mkdir()  # not committed
    (a_step(tmp_path, 40) / "manifest.json").write_text("{")  # damaged
    (tmp_path / "step-50").mkdir()
    (tmp_path / "step-00000060").symlink_to("step-00000020")
    assert [c.step for c in durable.committed(tmp_path)] == [5, 20, 123456789]
    found = durable.newest(tmp_path)
    assert found is not None
    assert (found.step, found.world, found.bytes, found.attempt) == (123456789, 2, 2000, "7.e0")


def test_a_directory_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DurableError, match="a directory is needed"):
        durable.committed(tmp_path / "file")


def test_a_manifest_of_another_step_is_refused(tmp_path: Path) -> None:
    a_step(tmp_path, 5).rename(tmp_path / "step-00000006")
    with pytest.raises(DurableError, match="step 5"):
        durable.read_manifest(tmp_path / "step-00000006")


def test_a_step_may_be_moved_to_another_name(tmp_path: Path) -> None:
    where = a_step(tmp_path, 5).rename(tmp_path / "best")
    assert verify(where) == []


# ---------------------------------------------------------------- verifying


def test_a_good_step_has_no_problems(tmp_path: Path) -> None:
    where = a_step(tmp_path, 5)
    assert verify(where) == []
    assert verify(where, [1]) == []


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def to_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("damage", [flip, cut, to_link, Path.unlink])
@pytest.mark.parametrize("name", ["7.e0-1_0.distcp", "7.e0-rank-1.json", ".metadata"])
def test_any_damage_is_found(tmp_path: Path, name: str, damage: Any) -> None:
    where = a_step(tmp_path, 5)
    damage(where / name)
    problems = verify(where)
    assert {problem.file for problem in problems} == {name}
    assert str(where) in problems[0].what
    if name != ".metadata":
        assert verify(where, [1])
    assert verify(where, [0]) == []


def test_metadata_of_a_commit_that_was_cut_off_is_no_damage(tmp_path: Path) -> None:
    where = a_step(tmp_path, 5)
    manifest = durable.read_manifest(where)
    (where / ".metadata").write_bytes(b"newer")
    assert verify(where)
    ahead = manifest._replace(attempt="7.e1", metadata=(5, digest_of(b"newer")))
    (where / "7.e1-commit.json").write_bytes(durable.encode_manifest(ahead))
    assert verify(where) == []


def test_verifying_what_is_not_committed(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(DurableError, match="never committed"):
        verify(tmp_path / "step-00000001")


# ---------------------------------------------------------------- retention


def steps(directory: Path) -> list[int]:
    return [step for step, _ in durable.step_dirs(directory)]


def uncommitted(directory: Path, step: int) -> Path:
    where = a_step(directory, step)
    (where / "manifest.json").unlink()
    return where


def test_retention(tmp_path: Path) -> None:
    for step in (10, 20, 30, 50):
        a_step(tmp_path, step)
    for step in (15, 40, 60):
        uncommitted(tmp_path, step)
    assert prune(tmp_path, 2, 50) == [f"step-000000{n}" for n in (10, 15, 20, 40)]
    assert steps(tmp_path) == [30, 50, 60]
    assert all(verify(c.path) == [] for c in durable.committed(tmp_path))


@pytest.mark.parametrize("keep", [0, 1])
def test_the_newest_always_stays_and_so_does_the_one_just_committed(
    tmp_path: Path, keep: int
) -> None:
    """After a return to an older step its checkpoints are not the newest by number."""
    for step in (10, 20, 30):
        a_step(tmp_path, step)
    prune(tmp_path, keep, 10)
    assert steps(tmp_path) == [10, 30]


def test_nothing_goes_before_something_is_committed(tmp_path: Path) -> None:
    uncommitted(tmp_path, 10)
    uncommitted(tmp_path, 20)
    assert prune(tmp_path, 1, 20) == []
    assert steps(tmp_path) == [10, 20]


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    a_step(tmp_path, 50)
    foreign = tmp_path / "step-00000010"
    foreign.mkdir()
    for name in ("__0_0.distcp", ".metadata"):
        (foreign / name).write_text("dcp's own")
    mixed = uncommitted(tmp_path, 20)
    (mixed / "notes.txt").write_text("mine")
    linked = tmp_path / "elsewhere"
    linked.mkdir()
    (linked / "7.e0-0_0.distcp").write_text("")
    (tmp_path / "step-00000030").symlink_to("elsewhere")
    assert prune(tmp_path, 1, 50) == []
    assert sorted(p.name for p in foreign.iterdir()) == [".metadata", "__0_0.distcp"]
    assert [p.name for p in mixed.iterdir()] == ["notes.txt"]
    assert [p.name for p in linked.iterdir()] == ["7.e0-0_0.distcp"]


def test_removal_begins_with_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off at any point, a step that goes is no committed one that does not verify."""
    a_step(tmp_path, 10)
    a_step(tmp_path, 20)
    removed: list[str] = []
    unlink = Path.unlink

    def watched(path: Path, missing_ok: bool = False) -> None:
        removed.append(path.name)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    prune(tmp_path, 1, 20)
    assert removed[0] == "manifest.json"
    assert len(removed) >= 5
