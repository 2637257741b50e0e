"""The generated pages, the site, man pages and completion are up to date; no link is dead."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import REPOSITORY

from lab.pages import __main__ as pages
from lab.pages import completion, man, messages, picture, settings
from lab.pages.hook import relinked
from lab.pages.markup import slug
from lab.pages.parsers import NAMES, commands
from robust_slurm.config import FIELDS, OWN_VARIABLES

AGAIN = "run: python -m lab.pages"


def test_the_generated_files_are_what_the_code_makes() -> None:
    assert [str(path) for path in pages.stale()] == [], AGAIN
    here = [str(path) for path, text in pages.pages().items() if str(REPOSITORY) in text]
    assert here == [], "a page must not depend on where the repository lies"


def test_every_message_has_a_cure_and_every_cure_a_message() -> None:
    found = messages.compare()
    assert len([text for _, texts in found.messages for text in texts]) > 300
    assert [f"{each.file}: {each.text}" for each in found.without] == [], (
        "add these to lab/pages/messages.toml, with what the reader should do"
    )
    assert found.unused == [], "no message has these parts of lab/pages/messages.toml any more"


def test_every_setting_has_its_subject() -> None:
    assert settings.OTHER not in settings.groups(), "name the new setting in settings.GROUPS"


def test_man_pages_show_every_option_and_no_text_is_read_as_a_request() -> None:
    for name in NAMES:
        page = man.page(name)
        for command in commands(name):
            for action in command.options():
                for word in action.option_strings:
                    assert word.replace("-", "\\-") in page, (name, word)
        requests = {line.split()[0] for line in page.splitlines() if line.startswith((".", "'"))}
        assert requests <= {'.\\"', ".TH", ".SH", ".TP", ".B", ".BR", ".br"}, name


COMPLETED = {
    # words so far, the last one being completed -> what bash offers
    ("robust-health", "re"): {"record", "replay", "repaired"},
    ("robust-health", "check", "--wh"): {"--where="},
    ("robust-srun", "--robust-spa"): {"--robust-spares="},
    ("robust-srun", "--robust-slow", "=", "re"): {"replace"},
    ("robust-srun", "--robust-slow=re"): {"replace"},
    ("robust-srun", "-N", "4", "--robust-no-w"): {"--robust-no-warm"},
    ("robust-srun", "--nodel"): {"--nodelist="},
    ("robust-srun", "python", "train.py", "--robust-sp"): set(),  # the training's own words
    ("robust-standby", ""): {"size", "apply", "show"},
    ("robust-standby", "apply", "--refill", "p"): {"pool"},
}


def test_bash_completes_commands_options_and_values() -> None:
    program = "compopt() { :; }\n" + "".join(completion.script(name) for name in NAMES)
    for words in COMPLETED:
        quoted = " ".join(f"'{word}'" for word in words)
        program += f"COMP_WORDS=({quoted}) COMP_CWORD={len(words) - 1}\n"
        program += f'_{words[0].replace("-", "_")}; echo "${{COMPREPLY[*]}}"\n'
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    found = [set(line.split()) for line in done.stdout.splitlines()]
    assert dict(zip(COMPLETED, found, strict=True)) == COMPLETED


@pytest.mark.parametrize(
    ("link", "page", "expected"),
    [
        ("[a](admin.md#limits)", "jobs.md", "[a](admin.md#limits)"),
        ("[w](../CONTRIBUTING.md)", "jobs.md", "[w](contributing.md)"),
        ("[`fsdp2.py`](../examples/fsdp2.py)", "jobs.md", "`examples/fsdp2.py`"),
        ("[all of them](../tests/data)", "jobs.md", "all of them (`tests/data`)"),
        ("[x](https://slurm.schedmd.com)", "jobs.md", "[x](https://slurm.schedmd.com)"),
        ("`[no](../link.py)`", "jobs.md", "`[no](../link.py)`"),
        ("[next](xid.md)", "checks/nvml.md", "[next](xid.md)"),
        ("[up](../../docs/admin.md)", "checks/nvml.md", "[up](../admin.md)"),
        ("[why](../admin.md)", "decisions/README.md", "[why](../admin.md)"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(
    link: str, page: str, expected: str
) -> None:
    assert relinked(link, f"docs/{page}", page) == expected


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_the_pages_at_the_top_have_no_dead_link(name: str) -> None:
    """The strict build of the site looks at the others."""
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for path, _, fragment in re.findall(r"\]\(([^)#:\s]+)(#([^)]*))?\)", text):
        target = REPOSITORY / path
        assert target.exists(), path
        if fragment:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert fragment in map(slug, headings), (path, fragment)


def test_the_picture_is_the_story_and_loads_nothing() -> None:
    lines = [
        "   1.0 s  lab    a real Slurm 22.05 is up",
        "noise",
        "   2.0 s  fault  \x1b[31mn3 dies\x1b[0m",
    ]
    assert picture.shortened(lines) == [lines[0], lines[1], lines[2]]
    drawn = picture.drawn("\n".join(lines))
    for svg in (drawn, picture.PICTURE.read_text(encoding="utf-8")):
        assert "@font-face" not in svg and "url(http" not in svg
    assert "n3&#160;dies" in drawn


def test_every_variable_of_the_reference_is_one_of_ours() -> None:
    text = (REPOSITORY / "docs" / "reference.md").read_text(encoding="utf-8")
    known = {f"ROBUST_{name.upper()}" for name in FIELDS} | OWN_VARIABLES
    known |= {"ROBUST_NAME", "ROBUST_LAB_SLURM"}  # any setting; the lab's
    named = set(re.findall(r"ROBUST_[A-Z_]+", text))
    assert len(named) > 10 and named - known == set()


# The front page -> at most two clicks -> a part of the page that answers.
ANSWERS = {
    "messages.html": "this job is not known to have --no-kill",
    "add-check.html": "[health.site.commands.scratch-space]",
    "ettr.html": "effective training time ratio",
}


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_answers_within_two_clicks(tmp_path: Path) -> None:
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        argv, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=300
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    front = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'(?:src|href)="https?://[^"]+', front) == []  # nothing from elsewhere
    once = set(re.findall(r'href="([\w/.-]+\.html)', front))
    for page, answer in ANSWERS.items():
        assert page in once
        assert answer in (tmp_path / page).read_text(encoding="utf-8")
