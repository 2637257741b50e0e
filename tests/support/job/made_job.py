"""A job as its supervisor knows it, with lines that keep what was sent in place of connections."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

from robust_slurm.config import Config
from srun_wrapper.command.layout import StepPlan
from srun_wrapper.command.srun_options import SrunCommand
from srun_wrapper.command.steps import Launch
from srun_wrapper.detect.stalls import Stalls
from srun_wrapper.job.bus import Bus
from srun_wrapper.job.model import Node, Role, planned_world
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.messages import Hello, Message, RankBeat
from srun_wrapper.protocol.server import Connection
from srun_wrapper.protocol.task_options import TaskOptions
from srun_wrapper.supervisor.inbox import Inbox


class Line:
    """Stands for one connection: keeps what was sent."""

    def __init__(self) -> None:
        self.peer = "10.0.0.1"
        self.agent: object | None = None
        self.sent: list[Message] = []
        self.closed = False

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.closed = True


class SentBus(Bus):
    """A bus that keeps what is sent; ``obey`` stands for the nodes."""

    def __init__(
        self, state: JobState, obey: Callable[[Node, Message], None] = lambda _node, _message: None
    ) -> None:
        super().__init__(state.nodes, state.changed)
        self.sent: list[tuple[str, Message]] = []  # "*": to all
        self.obey = obey
        state.bus = self

    def send(self, node: Node, message: Message) -> None:
        super().send(node, message)
        self.sent.append((node.name, message))
        self.obey(node, message)

    def broadcast(self, message: Message) -> None:
        self.sent.append(("*", message))


def made_stalls(state: JobState, *tell: Callable[[str], None]) -> Stalls:
    return Stalls(state.members, state.changed, state.config.stall_limit, *tell)


class KeptJournal(Journal):
    """A journal that keeps events and news."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.told: list[str] = []

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def news(self, text: str) -> None:
        self.told.append(text)

    def named(self, name: str) -> list[dict[str, Any]]:
        """Return the events of this name."""
        return [fields for each, fields in self.events if each == name]


def made_launch(*command: str) -> Launch:
    """Return the launch of a command without srun options."""
    return Launch(SrunCommand((), {}, command), StepPlan(), TaskOptions(), {})


def made_node(index: int, slots: int = 1, role: Role = Role.ACTIVE, name: str = "") -> Node:
    """Return a connected node of the job's own step, each slot of which is a task."""
    tasks = tuple(range(index * slots, (index + 1) * slots))
    name = name or f"n{index}"
    said = Hello(12, "0", index, name, tasks, 4, 4, 7000, 7001, 0, 0)
    line = as_connection(Line())
    return Node((12, "0", index), name, f"10.0.0.{index}", said, line, role, 0.0, 7001)


def as_connection(line: Line) -> Connection:
    return cast(Connection, line)


def hello(index: int, epoch: int = 0, standby_request: int = 0) -> Hello:
    job = 12 if not standby_request else 100 + standby_request
    return Hello(job, "0", index, f"n{index}", (0, 1), 4, 8, 7000, 7001, standby_request, epoch)


class Job:
    """A job of ``active`` nodes with two ranks each, and spares."""

    def __init__(self, active: int = 2, spares: int = 1, **config: Any) -> None:
        self.state = JobState(Config(**config), 12, "n0")
        self.inbox = Inbox(self.state)
        self.lines = [self.join(i) for i in range(active + spares)]
        nodes = list(self.state.nodes.values())
        plan = tuple((2 * i, 2 * i + 1) for i in range(active))
        places, ranks = planned_world(nodes, plan)
        self.state.members.lay_out(places, ranks)
        for node in places:
            node.role = Role.ACTIVE
        self.state.new_epoch()

    def join(self, index: int, epoch: int = 0, standby_request: int = 0) -> Line:
        line = Line()
        self.inbox.message(as_connection(line), hello(index, epoch, standby_request))
        return line

    def say(self, index: int, message: Message) -> None:
        self.inbox.message(as_connection(self.lines[index]), message)

    def node(self, index: int) -> Node:
        return list(self.state.nodes.values())[index]


def beat(local: int, step: int | None, beats: int, **more: Any) -> RankBeat:
    return RankBeat(local, step, beats, 0.0, source=more.pop("source", "explicit"), **more)


def silent_nodes(job: Job, *indexes: int, since: float = 1.0) -> None:
    for index in indexes:
        node = job.node(index)
        node.second_way, node.last_word = True, time.monotonic() - since
