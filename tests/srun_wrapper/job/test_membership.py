"""The members of the job, which only Membership writes."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_job import Job, made_node

import srun_wrapper
from srun_wrapper.job.membership import Membership
from srun_wrapper.job.model import Role

ROOM = Path(srun_wrapper.__file__).parent
OURS = {ROOM / "job" / name for name in ("membership.py", "model.py")}
WRITTEN = {"role", "places", "epoch", "stopping_epoch", "world"}
LISTS = {"append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse"}


def writes(source: str) -> Iterator[str]:
    """Yield the assignments to what Membership alone may write."""
    for node in ast.walk(ast.parse(source)):
        inside = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute)
        named = node.value if inside else node  # type: ignore[attr-defined]
        if isinstance(named, ast.Attribute) and named.attr in WRITTEN:
            if isinstance(node.ctx, ast.Store | ast.Del):  # type: ignore[attr-defined]
                yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            owner, _, method = ast.unparse(node.func).rpartition(".")
            if method in LISTS and owner.endswith(".places"):
                yield ast.unparse(node)


@pytest.mark.parametrize(
    "line",
    [
        "node.role = role",
        "state.world.places[0] = node",
        "world.places[:] = nodes",
        "world.places = nodes",
        "world.epoch += 1",
        "state.stopping_epoch = before = 1",
        "a, world.epoch = 1, 2",
        "state.world = World(0, [], [])",
        "del world.places[0]",
        "world.places.append(node)",
    ],
)
def test_writing_is_seen(line: str) -> None:
    assert len(list(writes(line))) == 1
    assert not list(writes("epoch = world.epoch; place = world.places[0]; names.append(place)"))


def test_nobody_else_writes_roles_places_and_epochs() -> None:
    found = {
        f"{path.relative_to(ROOM)}: {text}"
        for path in sorted(ROOM.rglob("*.py"))
        if path not in OURS
        for text in writes(path.read_text())
    }
    assert not found


def test_nodes_that_lose_their_seats_become_spares() -> None:
    """A node that has left keeps its role in any seat."""
    members = Membership(lambda _text: None)
    first, second, spare = (made_node(i, role=Role.SPARE) for i in range(3))
    for node in (first, second, spare):
        members.join(node)
    members.lay_out([first, second], [(0,), (1,)])
    for place in range(2):
        members.take_place(place, members.world.places[place])
    assert members.begin_epoch() == 1
    members.stop_epoch()
    members.move(second, Role.DEAD)
    members.seat([first, spare])
    assert [n.role for n in (first, second, spare)] == [Role.ACTIVE, Role.DEAD, Role.ACTIVE]
    members.seat([spare, first])
    members.arrange([first, spare])
    assert members.world.places == [first, spare] and members.stopping_epoch == 1
    members.lay_out([first], [(0,)])
    members.seat([spare])
    assert first.role is Role.SPARE and spare.role is Role.ACTIVE


def test_a_node_equals_itself_only() -> None:
    """All fields of all nodes would be compared where a thousand are looked for in a list."""
    node = made_node(1)
    assert copy.copy(node) != node
    assert len({node, copy.copy(node)}) == 2


def test_an_impossible_move_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    node, news = job.node(0), list[str]()
    job.state.on_news = news.append
    job.state.members.move(node, Role.EVICTED)
    with pytest.raises(AssertionError, match="n0 cannot become released"):
        job.state.members.move(node, Role.RELEASED)
    monkeypatch.setattr(job.state.members, "strict", False)
    job.state.members.move(node, Role.SPARE)
    assert node.role is Role.EVICTED
    assert news[1] == "internal error: n0 cannot become spare: it is evicted"
