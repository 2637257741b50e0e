"""Nodes that wait for ranks are asked for the files that a start needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from made_job import SentBus

from robust_slurm.config import Config
from srun_wrapper.decide.failure import Failure
from srun_wrapper.job.model import Node, Role
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.file_messages import FindFiles, FoundFile, FoundFiles
from srun_wrapper.protocol.messages import Hello, Message
from srun_wrapper.recover.standby import needed
from srun_wrapper.recover.standby.needed import Lack, NeededFiles

HOME = "/home/u"
FILES = ("/usr/bin/python", f"{HOME}/train.py", "/data/tokens")
RECORDS = "/home/u/state/jobs/7"


class Cluster:
    """n1 and n2 run ranks; s1 waits for some. ``lacks``: what each node does not have."""

    def __init__(self, **lacks: tuple[str, ...]) -> None:
        self.state = JobState(Config(standby_start_limit=0.2), 7, "n1")
        self.lacks = lacks
        self.mute: set[str] = set()
        self.mounts = {"n1": ["/", "/home", "/data"], "n2": ["/", "/home", "/data"]}
        self.served = {"/home", "/data"}
        self.asked: list[str] = []
        self.found: list[tuple[str, Lack]] = []
        self.new: set[str] = set()
        self.gone: tuple[str, ...] = ()  # everywhere, as soon as s1 is asked
        SentBus(self.state, self.obey)
        nodes = [self.node("n1", 0, Role.ACTIVE), self.node("n2", 1, Role.ACTIVE)]
        self.s1 = self.node("s1", 2, Role.SPARE)
        self.state.members.lay_out(nodes, [(0,), (1,)])
        self.state.members.begin_epoch()
        self.needed = NeededFiles(
            self.state, ["python", "train.py"], RECORDS, lambda: self.new, self._lacking
        )

    def _lacking(self, node: Node, lack: Lack) -> None:
        self.found.append((node.name, lack))

    def node(self, name: str, index: int, role: Role) -> Node:
        hello = Hello(7, "0", index, name, (index,), 3, 3, 7000, 7001, 0, 0, directory=HOME)
        line: Any = object()
        node = Node((7, "0", index), name, "10.0.0.1", hello, line, role, 0.0, 7001)
        self.state.members.join(node)
        return node

    def obey(self, node: Node, order: Message) -> None:
        assert isinstance(order, FindFiles)
        self.asked.append(node.name)
        if node.name in self.mute:
            return
        paths = dict.fromkeys([*order.paths, *(FILES if order.words else ())])
        if node.name == "s1":
            self.lacks |= dict.fromkeys(("n1", "n2"), self.gone)
        lacks, mounts = self.lacks.get(node.name, ()), self.mounts.get(node.name, ["/"])
        files = []
        for path in paths:
            mount = max((m for m in mounts if path.startswith(m)), key=len)
            files.append(FoundFile(path, path not in lacks, mount, mount in self.served))
        self.state.bus.deliver(node, FoundFiles(order.token, tuple(files)))

    def play(self, until: Callable[[], bool]) -> None:
        async def scene() -> None:
            self.needed.look(1000.0)
            await asyncio.wait_for(self.state.until(until, None), 10.0)

        asyncio.run(scene())


class Line:
    def send(self, _message: Message) -> None: ...


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needed, "SEEN", 0.2)


def ready(cluster: Cluster) -> Callable[[], bool]:
    for node in cluster.state.nodes.values():
        node.connection = Line()  # type: ignore[assignment]
    return lambda: cluster.s1.lacks is not None


def test_a_node_that_has_all_files_is_not_asked_again() -> None:
    cluster = Cluster()
    cluster.mounts["s1"] = cluster.mounts["n1"]
    cluster.play(ready(cluster))
    assert cluster.s1.lacks == "" and not cluster.found
    cluster.needed.look(5000.0)
    assert cluster.asked.count("s1") == 1 and cluster.needed.known(cluster.s1)


@pytest.mark.parametrize(
    ("mounts", "lacks", "text"),
    [
        (
            ["/", "/data"],
            (HOME, f"{HOME}/train.py", RECORDS),
            f"{HOME} is not there, nor are 2 more (the mount /home is missing)",
        ),
        (
            ["/", "/home", "/data"],
            (f"{HOME}/train.py",),
            f"{HOME}/train.py is not there (/home is mounted)",
        ),
        (
            ["/", "/home", "/home/u", "/data"],
            (f"{HOME}/train.py",),
            f"{HOME}/train.py is not there (/home/u is another file system there)",
        ),
    ],
)
def test_what_the_node_lacks_is_told(mounts: list[str], lacks: tuple[str, ...], text: str) -> None:
    cluster = Cluster(s1=lacks)
    cluster.mounts["s1"] = mounts
    cluster.play(ready(cluster))
    assert cluster.s1.lacks == text and cluster.found == [("s1", Lack(text, certain=True))]
    assert not cluster.state.spares()


def test_a_spare_that_lacked_a_file_is_asked_again_and_told_of_once() -> None:
    cluster = Cluster(s1=(f"{HOME}/train.py",))
    cluster.play(ready(cluster))
    cluster.needed._asked.clear()
    cluster.play(lambda: cluster.asked.count("s1") == 2)
    assert len(cluster.found) == 1
    cluster.lacks = {}
    cluster.needed._asked.clear()
    cluster.play(lambda: cluster.s1.lacks == "")
    assert cluster.state.spares() == [cluster.s1]


@pytest.mark.parametrize(
    ("n1", "n2", "mute"),
    [
        ((f"{HOME}/train.py",), (f"{HOME}/train.py",), ()),  # all lack it: removed since the start
        ((), (), ("n1", "n2")),  # nobody knows what is needed
    ],
)
def test_what_is_missing_everywhere_or_not_known_is_no_fault(
    n1: tuple[str, ...], n2: tuple[str, ...], mute: tuple[str, ...]
) -> None:
    cluster = Cluster(n1=n1, n2=n2, s1=(f"{HOME}/train.py",))
    cluster.mute = set(mute)
    cluster.play(ready(cluster))
    assert cluster.s1.lacks == "" and not cluster.found


def test_a_directory_that_not_all_nodes_have_and_records_on_a_local_disk_are_not_needed() -> None:
    cluster = Cluster(s1=(HOME, RECORDS))
    n2 = cluster.state.world.places[1]
    n2.hello = msgspec.structs.replace(n2.hello, directory="/tmp")
    cluster.served = set()
    cluster.play(ready(cluster))
    assert cluster.s1.lacks == ""


def test_a_node_that_does_not_answer_is_passed_over_without_a_report() -> None:
    cluster = Cluster()
    cluster.mute = {"s1"}
    cluster.play(ready(cluster))
    assert cluster.s1.lacks and not cluster.found[0][1].certain


def test_a_newcomer_is_not_asked_what_is_needed() -> None:
    cluster = Cluster(n1=FILES, s1=FILES)
    cluster.new = {"n1"}
    cluster.play(ready(cluster))
    assert "n1" not in cluster.asked and cluster.s1.lacks


@pytest.mark.parametrize("alone", [True, False])
def test_the_last_words_of_a_rank_name_a_file_that_its_node_lacks(alone: bool) -> None:
    tail = "Traceback\nFileNotFoundError: [Errno 2] No such file or directory: '/data/tokens'"
    lacks = ("/data/tokens",)
    cluster = Cluster(s1=lacks) if alone else Cluster(s1=lacks, n1=lacks, n2=lacks)
    ready(cluster)
    failure = Failure("crash", 10.0, 9.0, "s1", 1, 1, tail=tail)
    told = asyncio.run(cluster.needed.explain(cluster.s1, failure))
    assert told == ("/data/tokens is not there (the mount /data is missing)" if alone else "")


@pytest.mark.parametrize(
    ("path", "mounts", "text", "told"),
    [
        ("/tmp/prof/r3", ["/"], "/tmp/prof/r3 is not there", ""),  # of one node, made there
        ("/data/r3", ["/", "/home", "/data"], "/data/r3 is not there (/data is mounted)", "="),
        ("/ssd/r3", ["/"], "/ssd/r3 is not there (the mount /ssd is missing)", "="),
    ],
)
def test_a_file_on_a_disk_of_the_node_is_no_proof(
    path: str, mounts: list[str], text: str, told: str
) -> None:
    cluster = Cluster(s1=(path,))
    cluster.mounts["s1"] = mounts
    if "ssd" in path:
        cluster.mounts["n1"] = cluster.mounts["n2"] = ["/", "/ssd"]
    ready(cluster)
    failure = Failure("crash", 10.0, 9.0, "s1", 1, 1, tail=f"cannot open '{path}'")
    explained = asyncio.run(cluster.needed.explain(cluster.s1, failure))
    assert explained == (text if told else "")
    answer = asyncio.run(cluster.needed._seen((), [path]))
    lacks = asyncio.run(cluster.needed._compare([cluster.s1], answer, 0.2))
    assert lacks == {cluster.s1.key: Lack(text, certain=bool(told))}


def test_a_file_that_is_removed_while_nodes_are_asked_is_no_fault() -> None:
    cluster = Cluster(s1=("/data/tokens",))
    cluster.mounts["s1"] = cluster.mounts["n1"]
    cluster.gone = ("/data/tokens",)
    cluster.play(ready(cluster))
    assert cluster.s1.lacks == "" and not cluster.found


def test_a_lack_that_no_other_node_confirms_is_not_certain() -> None:
    cluster = Cluster(s1=("/data/tokens",))
    cluster.mounts["s1"] = cluster.mounts["n1"]
    ready(cluster)
    needed = asyncio.run(cluster.needed._seen((), ["/data/tokens"]))
    cluster.mute = {"n1", "n2"}
    lacks = asyncio.run(cluster.needed._compare([cluster.s1], needed, 0.2))
    assert [lack.certain for lack in lacks.values()] == [False] and lacks[cluster.s1.key].text
