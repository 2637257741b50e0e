"""A file is read once whatever its names, and other content of the same size is another file."""

from __future__ import annotations

import array as arrays
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from robust_slurm.data import DataError, jsonl
from robust_slurm.data.sources import files


def write(folder: Path, **parts: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, letters in parts.items():
        text = "".join(f'{{"tokens": [{ord(letter)}]}}\n' for letter in letters)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def read(source: Any) -> str:
    values = [v for part, _ in enumerate(source.parts()) for _, v in source.read(part)]
    return "".join(chr(each["tokens"][0]) for each in values)


def test_a_file_is_read_once_by_all_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "web", b="bbb", c="ccc")
    (folder / "x").mkdir()
    whole = jsonl(f"{folder}/*.jsonl")
    assert read(whole) == "bbbccc" and capfd.readouterr().err == ""
    (folder / "a.jsonl").symlink_to("b.jsonl")
    os.link(folder / "c.jsonl", folder / "d.jsonl")
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    patterns = ["*.jsonl", "x/../*.jsonl", f"{tmp_path}/link/*.jsonl", f"file://{folder}/b.jsonl"]
    linked = jsonl(patterns)
    assert read(linked) == "bbbccc"
    assert linked.fingerprint() == whole.fingerprint()
    assert "6 paths, as " in capfd.readouterr().err


@pytest.mark.parametrize("size", [3, 100_000])
def test_other_content_of_the_same_size_is_another_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(files, "WHOLE", 1 << 16)
    letters = "".join(chr(65 + at % 26) for at in range(size))
    folder = write(tmp_path / "web", a=letters, b=letters[::-1])
    before = jsonl(f"{folder}/*.jsonl").fingerprint()
    shutil.copytree(folder, tmp_path / "copy")  # with their times
    assert jsonl(f"{tmp_path}/copy/*.jsonl").fingerprint() == before
    os.utime(folder / "a.jsonl", ns=(1, 1))
    assert jsonl(f"{folder}/*.jsonl").fingerprint() == before
    for name, other in (("a", "c"), ("b", "a"), ("c", "b")):
        (tmp_path / f"copy/{name}.jsonl").rename(tmp_path / f"copy/{other}.jsonl")
    assert jsonl(f"{tmp_path}/copy/*.jsonl").fingerprint() != before, "they are swapped"
    write(folder, a="Z" + letters[1:])
    assert jsonl(f"{folder}/*.jsonl").fingerprint() != before, "it is written anew"


def test_a_file_that_is_written_anew_while_it_is_used_is_an_error(tmp_path: Path) -> None:
    folder = write(tmp_path / "web", a="abc")
    source = jsonl(f"{folder}/*.jsonl")
    source.parts()
    os.utime(folder / "a.jsonl", ns=(1, 1))
    assert read(source) == "abc"
    write(folder, a="aba")
    with pytest.raises(DataError, match=r"a\.jsonl: its content is not what it was when it was"):
        read(source)


def test_decode_may_return_the_same_buffers_for_every_record(tmp_path: Path) -> None:
    folder = write(tmp_path / "web", a="abc")
    array, tensor, pixels = np.zeros(1, np.int64), torch.zeros(1), bytearray(1)
    words: list[str] = [""]
    ids, image = arrays.array("i", [0]), SimpleNamespace(pixels=array)
    made = {"array": array, "tensor": tensor, "pixels": pixels, "words": words, "in": [array]}
    made |= {"ids": ids, "image": image}

    def decode(record: dict[str, Any]) -> dict[str, Any]:
        array[0] = tensor[0] = pixels[0] = ids[0] = record["tokens"][0]
        words[0] = chr(pixels[0])
        return made

    source = jsonl(f"{folder}/*.jsonl", decode)
    found = [values for _, values in source.read(0)]
    for name in ("array", "tensor", "ids"):
        assert [int(values[name][0]) for values in found] == [97, 98, 99]
    assert [int(values["image"].pixels[0]) for values in found] == [97, 98, 99]
    assert [values["pixels"] for values in found] == [b"a", b"b", b"c"]
    assert [values["words"] for values in found] == [["a"], ["b"], ["c"]]
