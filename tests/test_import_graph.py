"""No file of the repository imports itself in a circle, at type-checking time either."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
ROOMS = ("bench", "epilog", "health", "lab", "prolog", "robust_slurm", "srun_wrapper", "standby",
         "status")  # fmt: skip

KNOWN: list[set[str]] = [
    {"lab.control", "lab.keeper", "lab.outages"},
]
"""The circles that are left, each by its files. Take out those that are gone; add none."""


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


def graph(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return the modules that each module names; a package only by what it defines itself."""
    found = {}
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
    found = circles(graph(modules()))
    new = [sorted(group) for group in found if not any(group <= known for known in KNOWN)]
    assert not new, f"imports in a circle: {new}"
    gone = [sorted(known) for known in KNOWN if known not in found]
    assert not gone, f"these circles are smaller or gone: correct KNOWN: {gone}; now: {found}"


def test_the_rooms_of_health_point_one_way() -> None:
    edges: dict[str, set[str]] = {}
    for name, named in graph(modules()).items():
        if room := room_of_health(name):
            edges.setdefault(room, set()).update({room_of_health(each) for each in named})
    edges = {room: others & edges.keys() - {room} for room, others in edges.items()}
    assert len(edges) >= 9 and circles(edges) == []


def room_of_health(module: str) -> str:
    """Return the room within health that holds the module; empty for other modules."""
    parts = module.split(".")
    return parts[1] if parts[0] == "health" and len(parts) > 2 else ""


def test_only_the_command_imports_the_wiring_of_robust_srun() -> None:
    edges = graph(modules())
    users = {name for name, named in edges.items() if "srun_wrapper.supervisor.app" in named}
    assert users == {"srun_wrapper.cli", "bench.supervisor_load"}
