"""The catalogue: each signature by a real line, none by a line that only looks like one."""

from __future__ import annotations

from pathlib import Path

import pytest

from srun_wrapper.signatures.catalogue import CatalogueError, load
from srun_wrapper.signatures.hits import find_hits
from srun_wrapper.signatures.lines import read_lines
from srun_wrapper.signatures.literals import needed

DATA = Path(__file__).parents[2] / "data" / "failures"
LINES = [line.split("|", 1) for line in (DATA / "lines.txt").read_text().splitlines()]
BENIGN = (DATA / "benign.txt").read_text().splitlines()


@pytest.mark.parametrize(("name", "line"), LINES, ids=[name for name, _ in LINES])
def test_signature_matches_its_line(name: str, line: str) -> None:
    match = load().match(line)
    assert match is not None and match[0].id == name


def test_each_signature_has_a_line() -> None:
    names = [each.id for each in load().signatures]
    assert {name for name, _ in LINES} == set(names) and len(names) == len(set(names))


@pytest.mark.parametrize("line", BENIGN)
def test_harmless_lines_are_no_causes(line: str) -> None:
    assert [h.signature.id for h in find_hits(read_lines(line), load()) if h.weight >= 10] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = [", "not TOML"),
        ("[[signatur]]", "unknown table"),
        ("[[signature]]\nid = 'a'", "pattern must be a text"),
        ("[[signature]]\nid='a'\npattern='('\ncause='c'\nlayer='ib'\nblame='user'", "pattern:"),
        ("[[signature]]\nid='a'\npattern='.*'\ncause='c'\nlayer='ib'\nblame='user'", "every line"),
        ("[[signature]]\nid='a'\npattern='b'\ncause='c'\nlayer='gpu'\nblame='user'", "layer must"),
        ("[[signature]]\nid='a'\npattern='b'\ncause='c'\nlayer='ib'\nblame='user'\nx=1", "'x'"),
        (
            "[[signature]]\nid='a'\npattern='b'\ncause='c'\nlayer='ib'\nblame='user'\nevict='yes'",
            "needs blame = node",
        ),
    ],
)
def test_a_bad_site_file_says_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "site.toml"
    path.write_text(text)
    with pytest.raises(CatalogueError, match=said) as error:
        load(path)
    assert str(path) in str(error.value)


def test_a_sites_signature_comes_before_ours(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(
        "[[signature]]\nid = 'oss7'\npattern = 'KeyError.*oss7'\ncause = 'Server oss7 is away'\n"
        "layer = 'storage'\nblame = 'external'\n"
    )
    match = load(path).match("KeyError: 'oss7'")
    assert match is not None and match[0].id == "oss7"


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("Stale (NFS )?file handle", ("file handle",)),
        ("foo bar|quux", ("foo bar", "quux")),
        ("foo bar|.*", None),
        ("(alpha|beta)+ x", ("alpha", "beta")),
        ("(alpha)?", None),
        ("a[bc]d", None),
    ],
)
def test_words_that_a_match_must_contain(pattern: str, words: tuple[str, ...] | None) -> None:
    assert needed(pattern) == words


@pytest.mark.parametrize("line", [*BENIGN, *(line for _, line in LINES)])
def test_words_never_hide_a_match(line: str) -> None:
    slow = next((each.id for each in load().signatures if each.pattern.search(line)), None)
    match = load().match(line)
    assert (match[0].id if match else None) == slow
