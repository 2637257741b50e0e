"""No file of the repository imports itself in a circle, at type-checking time either."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
ROOMS = ("bench", "epilog", "examples", "health", "lab", "prolog", "robust_slurm", "srun_wrapper",
         "standby", "status")  # fmt: skip

CIRCLES = {
    "robust_slurm: auto heartbeat",
    "robust_slurm/checkpoint: capture durable planning store transfer",
    "robust_slurm/checkpoint/store: disk ranks",
}
"""The circles that are left between a folder's own files and folders. Add none."""

HELPERS = {"run_in_thread", "start_task"}
"""Files beside the rooms of srun_wrapper that any of them may import."""


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(path for room in ROOMS for path in (REPO / room).rglob("*.py")):
        name = ".".join(path.relative_to(REPO).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imports(path: Path) -> Iterator[str]:
    """Yield every name that the file imports, wherever in the file it does."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            inside = path.relative_to(REPO).parts[: -node.level] if node.level else ()
            module = ".".join((*inside, *filter(None, [node.module])))
            yield from (f"{module}.{alias.name}" for alias in node.names)


@cache
def graph() -> dict[str, set[str]]:
    """Return the modules that each module names; a package only by what it defines itself."""
    found = {}
    files = modules()
    for name, path in files.items():
        named = (each if each in files else each.rpartition(".")[0] for each in imports(path))
        found[name] = {each for each in named if each in files} - {name}
    return found


def circles(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules that reach one another (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            group = set(stack[at:])
            del stack[at:]
            if len(group) > 1:
                found.append(group)

    for name in edges:
        if name not in index:
            visit(name)
    return found


def test_circles_are_found_by_all_their_members() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set[str](), "f": {"a"}}
    assert circles(edges) == [{"a", "b", "c"}]


def test_no_files_import_each_other_in_a_circle() -> None:
    found = [sorted(group) for group in circles(graph())]
    assert not found, f"imports in a circle: {found}"


def test_the_entries_of_every_folder_import_one_way() -> None:
    found = {
        f"{folder}: {' '.join(sorted(group))}"
        for folder in folders()
        for group in circles(entries(folder))
    }
    assert sorted(found - CIRCLES) == [], "new circles"
    assert sorted(CIRCLES - found) == [], "these circles are smaller or gone: correct CIRCLES"


def folders() -> list[str]:
    """Return every folder that holds folders of code, by its path; "." is the repository."""
    packages = {path.parent for path in modules().values()}
    parents = {each.parent for each in packages if each != REPO and each.parent != REPO}
    return [".", *sorted(str(each.relative_to(REPO)) for each in parents)]


def entries(folder: str) -> dict[str, set[str]]:
    """Return which files and folders directly in ``folder`` each of them imports, of those."""
    place = {}
    for name, path in modules().items():
        if path.is_relative_to(REPO / folder) and path != REPO / folder / "__init__.py":
            place[name] = path.relative_to(REPO / folder).parts[0].removesuffix(".py")
    edges: dict[str, set[str]] = {each: set() for each in place.values()}
    for name, named in graph().items():
        if name in place:
            edges[place[name]] |= {place[each] for each in named if each in place} - {place[name]}
    return edges


def test_the_rooms_of_the_product_import_those_below_them() -> None:
    order = ("status", "srun_wrapper", "standby", "health", "robust_slurm")
    below = {room: set(order[number + 1 :]) for number, room in enumerate(order)}
    below |= {"prolog": {"health", "robust_slurm"}, "epilog": {"health", "robust_slurm"}}
    edges = entries(".")
    assert {room: edges[room] - below[room] for room in below} == {room: set() for room in below}


def test_examples_import_what_a_training_may() -> None:
    """A user copies them: only the library's public names may be in them."""
    ours = {f"{room}." for room in ROOMS if room != "examples"}
    used = {
        each
        for path in (REPO / "examples").glob("*.py")
        for each in imports(path)
        if f"{each}.".startswith(tuple(ours))
    }
    assert used == {"robust_slurm", "robust_slurm.data"}


def test_templates_name_programs_of_the_rooms_that_slurmd_runs() -> None:
    """A template is no Python yet: its imports are read as text."""
    found = {
        word
        for path in (REPO / "templates").glob("*.j2")
        for word in re.findall(r"^\s*(?:from|import) ([\w.{} ]+?)(?: import|$)",
                               path.read_text(encoding="utf-8"), re.MULTILINE)
    }  # fmt: skip
    assert found == {"os", "signal", "sys", "{{ module }}"}


def test_the_job_imports_active_tests_and_the_pool_of_the_node_gate_only() -> None:
    of_gate = {
        (name, other)
        for name, named in graph().items()
        for other in named
        if name.startswith(("srun_wrapper.", "standby.", "status.")) and other.startswith("health.")
    }
    assert of_gate
    assert [
        f"{name} imports {other}"
        for name, other in sorted(of_gate)
        if not name.startswith("standby.pool.")
        and not (
            name.startswith(("srun_wrapper.orders.", "srun_wrapper.replay."))
            and other.startswith(("health.active.", "health.active_tests"))
        )
    ] == []


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("srun_wrapper.agent.task", "torch health standby status"),
        ("srun_wrapper.cli", "torch status"),
        ("robust_slurm.heartbeat", "torch msgspec ClusterShell health srun_wrapper standby"),
        ("prolog.cli", "torch msgspec rich srun_wrapper standby status"),
        ("epilog.cli", "torch msgspec rich srun_wrapper standby status"),
    ],
)
def test_a_program_loads_nothing_that_it_has_no_use_for(module: str, unwanted: str) -> None:
    code = (
        f"import sys, {module}; print(*sorted(set({unwanted.split()}).intersection(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_rooms_of_srun_wrapper_import_those_below_them_in_the_table_of_the_house() -> None:
    text = (REPO / "docs/architecture.md").read_text(encoding="utf-8")
    table = text.partition("| `srun_wrapper/` | each")[2].partition("\n\n")[0]
    order = re.findall(r"^\| `(\w+)(?:/|\.py)`", table, re.MULTILINE)
    edges = entries("srun_wrapper")
    assert set(order) == edges.keys() - HELPERS
    upward = [
        f"{room} imports {other}"
        for number, room in enumerate(order)
        for other in sorted(edges[room].intersection(order[:number]))
    ]
    assert upward == []


def test_only_the_command_imports_the_wiring_of_robust_srun() -> None:
    edges = graph()
    users = {name for name, named in edges.items() if "srun_wrapper.supervisor.app" in named}
    assert users == {"srun_wrapper.cli", "bench.heartbeat.load"}
