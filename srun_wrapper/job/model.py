"""Members of the job: nodes, slots, ranks, and the place of each node in the world."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from robust_slurm.record import NotFinite
from srun_wrapper.decide.shared_cause import Silence
from srun_wrapper.protocol.messages import Hello, Message, RankBeat
from srun_wrapper.protocol.server import Connection

AgentKey = tuple[int, str, int]  # job id, step id, node index in the real step


class Role(enum.Enum):
    """Part of a node in the job; nodes with one of the last four have left it."""

    ACTIVE = "active"
    SPARE = "spare"
    DEAD = "dead"  # it does not answer, or its robust-task is gone
    EVICTED = "evicted"  # it answers, but the evidence is against it
    RELEASED = "released"  # not needed any more: in the end, or when the step was ended
    TOO_LATE = "too late"  # a standby node that reported after its place was filled


GONE = frozenset({Role.DEAD, Role.EVICTED, Role.RELEASED, Role.TOO_LATE})
MOVES: dict[Role, frozenset[Role]] = {
    Role.SPARE: frozenset({Role.ACTIVE, Role.DEAD, Role.EVICTED, Role.RELEASED}),
    # To a spare: another node computes a step again that this one had computed.
    Role.ACTIVE: frozenset({Role.SPARE, Role.DEAD, Role.EVICTED, Role.RELEASED}),
    Role.EVICTED: frozenset({Role.ACTIVE}),  # no node could replace it
    # It answers again and was not replaced; or (released) it ended with the whole step.
    Role.DEAD: frozenset({Role.ACTIVE, Role.SPARE, Role.RELEASED}),
    Role.RELEASED: frozenset(),
    Role.TOO_LATE: frozenset(),
}


@dataclass(slots=True, eq=False)
class Node:
    """One node with an agent, equal to itself only. Times are monotonic seconds of this host."""

    key: AgentKey
    name: str
    address: str
    hello: Hello
    connection: Connection | None
    role: Role
    last_word: float
    free_port: int
    standby_request: int = 0
    seen: int = 0  # highest message number received
    stopped: int = 0  # newest epoch whose end this node has confirmed
    stuck: tuple[int, ...] = ()
    stages: dict[str, float] = field(default_factory=dict)  # s that each stage of the stop took
    cut: tuple[str, ...] = ()  # see ``messages.Stopped``
    signalled: int = 0
    probing: bool = False
    asked_at: float = 0.0  # when probing began
    second_way: bool | None = None  # whether its probe port answers while it is well
    turned_away: int = 0  # failed probes while it was well
    unreachable: int = 0  # failed probes in a row
    reachable_at: float = 0.0  # when its host answered after failed probes
    ask_again: float = 0.0  # time before which it is not probed
    refused: bool = False  # its kernel refuses connections: its shim is gone
    refused_at: float | None = None  # since when
    ours: bool = False  # lost because a process of robust-slurm died: no evidence against it
    closed_at: float | None = None  # when its connection broke
    stdin: dict[int, bool] = field(default_factory=dict)  # local id that had input -> all is kept
    silence: Silence | None = None  # result of the last probe
    silent_as: Role | None = None  # its role until it was given up for its silence
    stores: dict[int, int] = field(default_factory=dict)  # local id -> port of the slot's store
    store_host: str = ""  # where these ports are, if not at its address
    warm: dict[int, int] = field(default_factory=dict)  # see ``messages.WarmRanks``, by local id
    stalled: tuple[str, ...] = ()  # shared file systems in use that do not answer
    stalled_at: dict[str, float] = field(default_factory=dict)  # since when each of them
    own_mount: str = ""  # the one of them for which it was lost, as it answers on other nodes
    starting: bool = False  # a rank that is being started waits for them in exec
    counted: dict[str, int] = field(default_factory=dict)  # see ``messages.Counted``
    reading: bool = False  # its error counters are being read; ``counted`` is not up to date
    counted_shown: dict[str, int] = field(default_factory=dict)  # ``counted`` at the last incident
    lacks: str | None = None  # what it lacks to run ranks, in words; None: not known yet
    order: Message | None = None  # last Start, Stop or Finish: sent again on a new connection

    def heard(self, now: float) -> None:
        """Note a sign of life of its agent."""
        self.last_word = now
        self.ask_again = 0.0
        self.unreachable = 0
        self.silence = None

    @property
    def gone(self) -> bool:
        """True if the node has left the job, for whatever reason."""
        return self.role in GONE

    @property
    def job_id(self) -> int:
        return self.key[0]

    @property
    def slots(self) -> int:
        return len(self.hello.tasks)


@dataclass(slots=True)
class Rank:
    """One rank in the running epoch."""

    rank: int
    node: Node
    local: int
    started: bool = False
    exit: tuple[int, int] | None = None  # (code, signal)
    step: int | None = None
    beats: int = 0
    last_beat: float = 0.0
    phase: str = ""
    phase_since: float = 0.0
    source: str = ""
    loss: float | None = None
    grad_norm: float | None = None
    nan: NotFinite | None = None
    nonfinite_norms: int = 0  # reported steps in a row whose gradient norm was not finite
    nonfinite_since: int | None = None  # the first of them
    ended: bool = False  # the process that made the steps has ended, in a torchrun or a shell
    proven: int | None = None  # newest saved step that a finite loss was computed from
    sound: int | None = None  # step of the beat before ``nan``, if its loss was finite
    healed: bool = False  # losses were not finite once, and are again

    def take(self, beat: RankBeat, now: float) -> int:
        """Store a heartbeat; returns how many steps it is ahead of the last one known."""
        ahead = beat.beats - self.beats
        self.beats = beat.beats
        self.step = beat.step
        self.source = beat.source
        self.loss, self.grad_norm, self.nan = beat.loss, beat.grad_norm, beat.nan
        self.ended, self.proven = beat.ended, beat.proven
        self.sound, self.healed = beat.sound, beat.healed
        norm = beat.grad_norm
        if norm is not None and ahead > 0:
            if norm - norm == 0.0:  # finite
                self.nonfinite_norms = 0
            else:
                self.nonfinite_since = self.nonfinite_since if self.nonfinite_norms else beat.step
                self.nonfinite_norms += 1
        if beat.beats:
            self.last_beat = max(self.last_beat, now - beat.age)
        self.phase = beat.phase
        self.phase_since = now - beat.phase_age if beat.phase else 0.0
        return max(0, ahead)


@dataclass(slots=True)
class World:
    """The virtual step of one epoch: place -> node, ranks by place."""

    epoch: int
    places: list[Node]
    ranks: list[tuple[int, ...]]  # ranks of each place
    by_rank: dict[int, Rank] = field(default_factory=dict)
    # Ranks that a slot's command started by itself (torchrun): seen by their heartbeats only.
    inner: dict[tuple[int, int], Rank] = field(default_factory=dict)
    # Place by id(node), as the epoch began: looked up at every heartbeat of every rank.
    _place: dict[int, int] = field(default_factory=dict, repr=False)
    # Numbers of ranks of this epoch that have been started (of them warm, or kept from the epoch
    # before), have made a step (or ended), have ended.
    started: int = 0
    warm: int = 0
    kept: int = 0
    stepped: int = 0
    exited: int = 0
    # Numbers of the ranks that have ever made a step: where steps are seen in the output, that
    # may be rank 0 alone.
    steppers: set[int] = field(default_factory=set)
    resized: tuple[int, int] | None = None
    """Numbers of the training's ranks at the job's begin and now; None: they are equal."""
    replica_ranks: int = 1
    """Ranks that compute a share of the batch together, once the world's size has changed."""

    def resize(
        self, places: Sequence[Node], ranks: Sequence[tuple[int, ...]], origin: Mapping[int, int]
    ) -> None:
        """Give these nodes these ranks each, from the next epoch on.

        ``origin``: new rank -> the old one that it continues. Until then no node has a place.
        """
        self.places[:], self.ranks[:] = places, ranks
        self._place.clear()
        slots = {new for new, old in origin.items() if old in self.steppers}
        self.steppers = slots or self.steppers

    def begin(self, epoch: int) -> None:
        """Forget the last epoch's ranks; ranks get local ids in order."""
        self.epoch = epoch
        self.started = self.warm = self.kept = self.stepped = self.exited = 0
        self.inner = {}
        self._place = {id(node): place for place, node in enumerate(self.places)}
        self.by_rank = {
            rank: Rank(rank, node, local)
            for node, ranks in zip(self.places, self.ranks, strict=True)
            for local, rank in enumerate(ranks)
        }

    @property
    def size(self) -> int:
        return sum(len(ranks) for ranks in self.ranks)

    @property
    def uneven(self) -> bool:
        """True if some ranks compute more shares of the batch than others."""
        return self.resized is not None and self.resized[0] % self.resized[1] > 0

    def rank_at(self, node: Node, local: int) -> Rank | None:
        """The rank of a slot; beyond the slots, the torchrun rank with that LOCAL_RANK."""
        place = self.place_of(node)
        if place is None:
            return None  # a spare, or it has left, or it takes part from the next epoch on
        ranks = self.ranks[place]
        if local < len(ranks):
            return self.by_rank.get(ranks[local])
        return self.inner.setdefault((place, local), Rank(-1, node, local, True))

    def running(self) -> list[Rank]:
        """Return the ranks that compute: of a launcher (torchrun) those that it has started."""
        launched = {id(rank.node) for rank in self.inner.values()}
        slots = [rank for rank in self.by_rank.values() if id(rank.node) not in launched]
        return [*slots, *self.inner.values()]

    def place_of(self, node: Node) -> int | None:
        """The node's place in this epoch; None for one that has none."""
        place = self._place.get(id(node))
        return place if place is not None and self.places[place] is node else None

    def note_started(self, rank: Rank, warm: bool = False, kept: bool = False) -> None:
        if not rank.started:
            self.started += 1
            self.warm += warm
            self.kept += kept
        rank.started = True

    def note_exit(self, rank: Rank, code: int, signum: int) -> None:
        if rank.exit is None:
            self.exited += 1
            # A rank that has ended is not waited for.
            self.stepped += rank.beats == 0 and rank.rank in self.steppers
        rank.exit = (code, signum)

    def note_first_step(self, rank: Rank) -> None:
        self.stepped += 1
        self.steppers.add(rank.rank)

    def exit_code(self) -> int:
        """Return the exit code that srun makes of the ranks that have ended: the highest one."""
        ends = (rank.exit for rank in self.by_rank.values() if rank.exit is not None)
        return max((128 + signum if signum else code for code, signum in ends), default=0)

    # Counted, not searched: these are asked after every message of ten thousand ranks.

    def all_exited(self) -> bool:
        return self.exited >= len(self.by_rank)

    def is_ending(self) -> bool:
        """True if a rank has ended well: the others will, each in its own time.

        A process that ended badly inside its torchrun or shell soon ends that as well, badly.
        """
        ranks = (*self.by_rank.values(), *self.inner.values())
        return any(r.ended if r.exit is None else r.exit == (0, 0) for r in ranks)

    def all_started(self) -> bool:
        return self.started >= len(self.by_rank)

    def all_tried(self) -> bool:
        """True if no rank is still to be started: each was, or has ended, or its node is lost."""
        return all(
            rank.started or rank.exit is not None or rank.node.gone
            for rank in self.by_rank.values()
        )

    def all_nodes_ended(self) -> bool:
        """True if each node that lives has a rank that has ended, and so has shown its error."""
        ended = {id(rank.node) for rank in self.by_rank.values() if rank.exit is not None}
        return all(id(node) in ended for node in self.places if not node.gone)

    def all_stepped(self) -> bool:
        """True if all ranks that have made steps before have made one in this epoch."""
        return self.stepped >= len(self.steppers)


def real_world(nodes: list[Node]) -> tuple[list[Node], list[tuple[int, ...]]]:
    """Places and ranks exactly as the real step has them (no spares)."""
    ordered = sorted(nodes, key=lambda n: n.key[2])
    return ordered, [n.hello.tasks for n in ordered]


def planned_world(
    nodes: list[Node], ranks: tuple[tuple[int, ...], ...]
) -> tuple[list[Node], list[tuple[int, ...]]]:
    """The step's first nodes with these ranks each; the others are spares. Standby nodes last."""
    ordered = sorted(nodes, key=lambda n: (n.standby_request, n.key[2]))
    return ordered[: len(ranks)], list(ranks)


def first_places(
    nodes: list[Node], planned: tuple[tuple[int, ...], ...] | None
) -> tuple[list[Node], list[tuple[int, ...]]]:
    """Places and ranks of the first epoch, on those of ``nodes`` that were not lost meanwhile.

    ``planned``: ranks of each place; None: as Slurm has laid the step out.

    Raises:
        LookupError: a place stays empty.
        ValueError: a node has fewer tasks than the ranks that it should run.
    """
    live = [n for n in nodes if not n.gone]
    places, ranks = real_world(live) if planned is None else planned_world(live, planned)
    wanted = len(nodes) if planned is None else len(planned)
    if len(places) < wanted:
        gone = ", ".join(n.name for n in nodes if n.gone and not n.standby_request)
        raise LookupError(
            f"{gone or 'a node'} left before any rank was started: "
            f"nodes for {len(places)} of {wanted} places"
        )
    for node, own in zip(places, ranks, strict=True):
        if node.slots < len(own):
            raise ValueError(
                f"{node.name} got {node.slots} of the {len(own)} tasks that every node should "
                "have: its CPUs are too few; ask for --exclusive, or --cpus-per-task"
            )
    return places, ranks
