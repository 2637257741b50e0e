"""Ask a node that waits for ranks whether it has the files that starting them needs.

A standby node that lacks a mount is found before its ranks are needed. Which files are needed is
seen on a node whose ranks run; what is missing there as well is no node's fault.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from srun_wrapper.decide.failure import Failure
from srun_wrapper.job.model import AgentKey, Node, Role
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.file_messages import FindFiles, FoundFile, FoundFiles
from srun_wrapper.start_task import start_task

OLD = 2  # nodes whose ranks run that are asked, for one may have just died
SEEN = 1.0  # s for them to answer
AGAIN = 60.0  # s until a spare that lacked a file is asked again
TOLD = 0.5  # s over the limit of the file systems for a node's answer to come
NAMED = re.compile(r"""'([^'\n]{2,})'|"([^"\n]{2,})"|(?<![\w.])(/[\w.@+=,~%/-]+)""")
LINES, PATHS = 20, 32  # of a rank's last words in which files are looked for; files


def tell_passed_over(node: str, what: str) -> None:
    """Tell the user of a node that cannot run ranks."""
    say(f"{node} is passed over: {what}; see that it has the mounts and files of the others")


class Lack(NamedTuple):
    """A fault of a node that waits for ranks: what it lacks."""

    text: str = ""  # in words; "": nothing
    certain: bool = False
    """False if it has not said so: it, or a file system of it, did not answer in time.

    Nor is it certain of a file on a disk of its own: the other node may have made it.
    """


class NeededFiles:
    """Asks each node that waits for ranks once; ``Node.lacks`` is the result."""

    def __init__(
        self,
        state: JobState,
        command: Sequence[str],
        records: str,
        newcomers: Callable[[], set[str]],
        lacking: Callable[[Node, Lack], None],
    ) -> None:
        """``records``: the job's directory; ``lacking``: called with what a node is found to lack.

        ``newcomers``: nodes that have just taken a place: they may lack something themselves.
        """
        self._state = state
        self._command = tuple(command)
        self._records = records
        self._newcomers = newcomers
        self._lacking = lacking
        self._asked: dict[AgentKey, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def look(self, now: float) -> None:
        """Ask the nodes that have come since; called all the time."""
        waiting = [
            node
            for node in self._state.nodes.values()
            if self._waits(node) and now - self._asked.get(node.key, -AGAIN) >= AGAIN
        ]
        if waiting and self._old():
            self._asked.update({node.key: now for node in waiting})
            start_task(self._tasks, self._check(waiting))

    def known(self, node: Node) -> bool:
        """Return whether it is known what the node lacks, or will never be; ask it at once."""
        if node.lacks is None:
            self.look(time.monotonic())
        return node.lacks is not None or not node.hello.directory or not self._old()

    def _waits(self, node: Node) -> bool:
        able = node.role is Role.SPARE and node.connection is not None and node.hello.directory
        return bool(able) and node.lacks != ""

    def _old(self) -> list[Node]:
        """Return nodes whose ranks run, or have run."""
        world = self._state.world
        if not world.epoch:
            return []
        new = self._newcomers()
        nodes = [n for n in world.places if not n.gone and n.connection and n.hello.directory]
        return [n for n in nodes if n.name not in new][:OLD]

    async def _check(self, waiting: list[Node]) -> None:
        lacks: dict[AgentKey, Lack] = {}
        try:
            lacks = await self._compare(
                waiting, await self._needed(), self._state.config.standby_start_limit
            )
        finally:  # whatever happened, nobody waits for it any more
            for node in waiting:
                before, lack = node.lacks, lacks.get(node.key, Lack())
                node.lacks = lack.text
                if lack.text and lack.text != before and node.role is Role.SPARE:
                    self._lacking(node, lack)
            self._state.changed.set()

    async def _needed(self) -> list[FoundFile]:
        """Return the files that a start needs, and that a node has whose ranks run."""
        code, nodes = self._state.code, self._state.nodes.values()
        words = code.command if code is not None else self._command
        own = {n.hello.directory for n in nodes if not n.standby_request}
        # One that only some nodes have was made by the batch script: Slurm takes /tmp for it.
        directory = own if len(own) == 1 and code is None else set[str]()
        seen = await self._seen(words, [*directory, *filter(None, [self._records])])
        return [f for f in seen if f.there and (f.served or f.path != self._records)]

    async def _seen(self, words: Sequence[str], paths: Sequence[str]) -> list[FoundFile]:
        """Return the files as a node sees them whose ranks run."""
        order = lambda token: [  # noqa: E731
            (n, FindFiles(token, tuple(words), tuple(paths), SEEN)) for n in self._old()
        ]
        with self._state.bus.ask(FoundFiles, order) as request:
            await request.until(lambda: bool(request.replies), SEEN)
            return [file for _, reply in request.replies[:1] for file in reply.files]

    async def _compare(
        self, nodes: Sequence[Node], needed: Sequence[FoundFile], limit: float
    ) -> dict[AgentKey, Lack]:
        """Return what each of the nodes lacks of these files."""
        if not needed:
            return {}
        paths = tuple(file.path for file in needed)
        order = lambda token: [(n, FindFiles(token, (), paths, limit)) for n in nodes]  # noqa: E731
        with self._state.bus.ask(FoundFiles, order) as request:
            await request.until(lambda: len(request.replies) >= len(nodes), limit + TOLD)
            answers = {node.key: reply for node, reply in request.replies}
        found = [file for answer in answers.values() for file in answer.files]
        lost = {file.path for file in found if not file.there}
        # Others were asked first: a file may have been removed or replaced in between.
        again = {file.path: file.there for file in await self._seen((), list(lost))} if lost else {}
        still = [file for file in needed if again.get(file.path, True)]
        return {n.key: _missing(still, answers.get(n.key), limit, set(again)) for n in nodes}

    async def explain(self, node: Node, failure: Failure) -> str:
        """Return which file the last words of a rank name that its node alone does not have."""
        needed = [file for file in await self._seen((), _named(failure.tail)) if file.there]
        lack = (await self._compare([node], needed, SEEN)).get(node.key, Lack())
        return lack.text if lack.certain else ""

    async def close(self) -> None:
        """End what is still being asked."""
        for task in list(self._tasks):
            task.cancel()


def _missing(
    needed: Sequence[FoundFile], answer: FoundFiles | None, limit: float, seen: Collection[str]
) -> Lack:
    """Return what a node lacks of the files that others have; ``seen``: a second time."""
    if not needed:
        return Lack()
    if answer is None:
        return Lack(f"no answer in {limit:g} s whether {needed[0].path} is there")
    there = {file.path: file for file in answer.files}
    silent = [file for file in needed if file.path not in there]
    lost = [file for file in needed if file.path in there and not there[file.path].there]
    if not lost:
        return Lack(f"{silent[0].path} does not answer in {limit:g} s") if silent else Lack()
    other = [file for file in lost if file.served or there[file.path].mount != file.mount]
    proof = [file for file in other if file.path in seen]
    lost = proof or lost
    first, more = lost[0], f", nor are {len(lost) - 1} more" if len(lost) > 1 else ""
    own = there[first.path].mount
    what = f" ({own} is mounted)" if own != "/" else ""
    if own != first.mount:
        what = f" (the mount {first.mount} is missing)"
    if len(own) > len(first.mount):  # something else lies over it
        what = f" ({own} is another file system there)"
    return Lack(f"{first.path} is not there{more}{what}", certain=bool(proof))


def _named(tail: str) -> tuple[str, ...]:
    """Return what may be files in the last lines of a rank's output."""
    text = "\n".join(tail.splitlines()[-LINES:])
    found = [next(filter(None, groups)) for groups in NAMED.findall(text)]
    return tuple(dict.fromkeys(reversed(found)))[:PATHS]
