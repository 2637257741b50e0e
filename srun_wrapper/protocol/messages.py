"""Messages between robust-srun (the supervisor), the node agents and the shims.

One agent per node (the shim with local id 0) holds the node's only connection to the supervisor;
the node's other shims talk through it. Messages are msgpack arrays, tagged by their first
element. New fields go at the end, with a default: an older reader skips what it does not know.
A new kind of message to the supervisor is skipped as well (see ``server``); a new order is not.
Times are seconds; ``*_age`` are ages at the moment of sending, because nodes' clocks differ.
"""

from __future__ import annotations

import msgspec

from robust_slurm.checkpoint.store.events import Restore
from robust_slurm.record import NotFinite
from srun_wrapper.protocol.base import Message as Message
from srun_wrapper.protocol.base import NumberedMessage as NumberedMessage
from srun_wrapper.protocol.base import Reply as Reply
from srun_wrapper.protocol.checkpoint_messages import FromStore, Saved, ToStore
from srun_wrapper.protocol.closer_messages import LookCloser, LookedCloser
from srun_wrapper.protocol.code import Code
from srun_wrapper.protocol.file_messages import FindFiles, FoundFiles
from srun_wrapper.protocol.looking_messages import Look, Machine, WorkCounters
from srun_wrapper.protocol.peer_messages import PeerAsk as PeerAsk
from srun_wrapper.protocol.peer_messages import PeerSay as PeerSay

# ---------------------------------------------------------------- shim <-> its node's agent


class SlotHello(Message):
    """A shim reports to its node's agent."""

    local: int  # SLURM_LOCALID
    task: int  # SLURM_PROCID in the real step
    pid: int


class SlotWelcome(Message):
    run_dir: str  # directory for the beat records, 0700, in memory


# ---------------------------------------------------------------- agent -> supervisor


class Hello(Message):
    """First message of an agent on each connection, also after a lost one."""

    job_id: int
    step_id: str
    node_index: int  # SLURM_NODEID in the real step
    node: str
    tasks: tuple[int, ...]  # SLURM_PROCID of each slot, by local id
    step_nodes: int
    step_tasks: int
    probe_port: int
    free_port: int
    standby_request: int  # 0: the main step; else the number of the request for a standby node
    epoch: int  # epoch its ranks run in; 0 when none was started yet
    seen: int = 0  # highest message number it has already had acknowledged
    life: int = 0  # how many agents of this node have died before it
    data_port: int = 0  # where other nodes' data processes reach this one's; 0: nowhere
    directory: str = ""  # the task's; "": it does not know ``FindFiles``, as older agents


class RankBeat(msgspec.Struct, array_like=True):
    """The newest heartbeat of one rank."""

    local: int
    step: int | None
    beats: int
    age: float
    phase: str = ""
    phase_age: float = 0.0
    source: str = ""
    loss: float | None = None
    grad_norm: float | None = None
    nan: NotFinite | None = None
    ended: bool = False  # the process that made these steps has ended
    proven: int | None = None  # newest saved step that a finite loss was computed from
    sound: int | None = None  # step of the beat before ``nan``, if its loss was finite
    healed: bool = False  # losses were not finite once, and are again


class Report(Message):
    """Sent every interval, and at once when something changed."""

    epoch: int
    beats: tuple[RankBeat, ...]
    saved: tuple[Saved, ...] = ()  # by ranks that saved since the last report
    data: bytes = b""  # news of the node's data process: ``data_messages.DataReport``


class Started(NumberedMessage):
    epoch: int
    local: int
    pid: int
    warm: bool = False  # forked from an interpreter that had everything imported
    kept: bool = False  # the process of the epoch before, which rejoined


class Exited(NumberedMessage):
    """A rank's process ended by itself (not by a Stop order)."""

    epoch: int
    local: int
    code: int | None  # exit code, None when a signal ended it
    signal: int | None
    age: float
    tail: str  # the last lines of its stderr
    launched: bool = True  # False: the command could not be run at all
    facts: tuple[str, ...] = ()  # what the node has recorded about it, see ``rank_facts``


class Stopped(NumberedMessage):
    """All processes of this node's ranks of that epoch are gone."""

    epoch: int
    free_port: int
    stuck: tuple[int, ...] = ()  # pids that survived SIGKILL
    stages: dict[str, float] = msgspec.field(default_factory=dict)  # s of each (stop_stages)
    cut: tuple[str, ...] = ()  # ranks that were killed while they were still writing, in words
    reading: bool = False  # the node's error counters are being read; ``Counted`` follows


class StdinRead(NumberedMessage):
    """Input has come through a slot's stdin."""

    local: int
    whole: bool  # all of it is kept for the next incarnation of the rank


class SlotLost(NumberedMessage):
    """A shim of this node vanished."""

    local: int


class Signalled(NumberedMessage):
    """Slurm (scancel, time limit, a shrink) signalled this node's shims."""

    signum: int


class Stalled(NumberedMessage):
    """Shared file systems in use on this node do not answer; () when all of them do again."""

    mounts: tuple[str, ...]
    starting: bool  # a rank that is being started has not returned from exec


class Logged(NumberedMessage):
    """A line for robust-srun's log, from a robust-task; bounded by ``agent.task_log``."""

    level: int  # as in logging
    text: str
    dropped: int = 0  # lines that were left out before it, because they came too fast
    trouble: str = ""  # of a stream, whose line is printed: the same for other ranks' streams


class Counted(NumberedMessage):
    """Error counters of this node that have grown since its agent began, by how much."""

    grown: dict[str, int]
    reading: bool = False  # the ``Counted`` that ``Stopped`` has announced is still to come


class Wrote(NumberedMessage):
    """Large files that this node's ranks are writing, and that look like checkpoints."""

    paths: tuple[str, ...]


class SlotActivity(msgspec.Struct, array_like=True):
    """Activity of one rank's process tree during an inspection."""

    local: int
    state: str  # T: its rank is stopped; else the first of D (waits for I/O), R, S; '' gone
    cpu: float  # seconds of CPU used in the window
    io: int  # bytes read and written in the window
    stack: tuple[str, ...] = ()  # of its first rank: main thread, innermost first
    moved: bool = False  # stack changed between the start and the end of the window
    looks: tuple[Look, ...] = ()  # its processes, the ranks first
    used: WorkCounters | None = None
    tracer: str = ""  # the debugger that traces one of its processes, in words


class Inspected(Reply):
    """A node's answer to Inspect."""

    window: float
    samples: tuple[SlotActivity, ...]
    answering: tuple[str, ...] = ()  # shared file systems in use on this node that have answered
    machine: Machine | None = None


# ---------------------------------------------------------------- supervisor -> agent


class Ack(Message):
    """Answer to each Report: the supervisor lives. ``seen``: highest message number received."""

    seen: int
    interval: float  # s between reports from now on


class RankStart(msgspec.Struct, array_like=True):
    local: int
    rank: int
    env: dict[str, str]


class Peer(msgspec.Struct, array_like=True):
    """Another agent, to be asked whether it still hears the supervisor."""

    index: int
    host: str
    port: int


class Start(Message):
    """Begin an epoch on this node; whatever runs of an older one is stopped first."""

    epoch: int
    env: dict[str, str]
    ranks: tuple[RankStart, ...]
    grace: float
    index: int  # this node's place in the virtual world
    first: bool  # nothing ran before in this job
    nodes: int
    master: str
    port: int
    peers: tuple[Peer, ...] = ()
    restore: Restore | None = None
    moved: bool = False  # places are not as srun has numbered the nodes
    code: Code | None = None  # None: the user's files as they are
    rejoin: bool = False  # ranks that wait (see Stop) go on in this epoch


class Stop(Message):
    epoch: int
    grace: float
    rejoin: float = 0.0  # s for ranks in resilient() to say that they wait for the next epoch


class Signal(Message):
    """Pass a signal to the ranks.

    ``early``: it was sent before they were started, and waits until they are ready for it.
    """

    signum: int
    early: bool = False


class Inspect(Message):
    token: int
    window: float
    ask: bool = True  # send a signal to processes of which py-spy gives no stack
    quick: bool = False  # read each rank once, nothing else; an older agent looks as always
    machine: bool = False  # read the node's hardware and load for the answers after this one


class Finish(Message):
    """End the shims, each with its rank's own exit (code, signal), by local id."""

    exits: tuple[tuple[int, int], ...]


# ---------------------------------------------------------------- warm starts


class Imports(NumberedMessage):
    """Imports at the first step, sent by one rank of the job (``imports.pack``).

    ``ranks``: number of ranks that a launcher (torchrun) has started there, the sender's among
    them; 0: it is the command itself. ``environ``: what counted when such a rank's interpreter
    started.
    """

    learnt: bytes
    ranks: int = 0
    environ: dict[str, str] = msgspec.field(default_factory=dict)


class WarmRanks(NumberedMessage):
    """Number of a slot's ranks that would start warm; 0: none, and none is being made ready."""

    local: int
    ready: int


class Warmup(Message):
    """Order to a slot without a rank to import the same (see ``Imports``)."""

    learnt: bytes
    ranks: int = 0
    environ: dict[str, str] = msgspec.field(default_factory=dict)
    code: Code | None = None


# ---------------------------------------------------------------- stop-time tests


class RunTests(Message):
    """Start a worker of the active tests in this slot; the ranks are down.

    It finds its coordinator at the supervisor's address and ``port``; its key is made of the
    step's and ``token`` (``test_worker.session_key``), so that no key is sent.
    """

    token: int
    port: int
    life: float  # s after which it ends itself
    python: str  # that has torch; "": the shim's own
    every_slot: bool  # else only local id 0


class WorkerEnded(NumberedMessage):
    """A worker has ended. ``code``: as subprocess has it; ``tail``: the end of its output."""

    token: int
    local: int
    code: int
    tail: str


_FromSlot = (
    Started
    | Exited
    | StdinRead
    | Stopped
    | Inspected
    | LookedCloser
    | Imports
    | WarmRanks
    | WorkerEnded
    | Logged
    | FromStore
)
_ToSlot = Start | Stop | Signal | Inspect | LookCloser | Finish | Warmup | RunTests | ToStore
FromShim = SlotHello | _FromSlot
ToShim = SlotWelcome | _ToSlot
_FromNode = Hello | Report | SlotLost | Signalled | Stalled | Counted | Wrote | PeerAsk | FoundFiles
FromAgent = _FromNode | _FromSlot
ToAgent = Ack | FindFiles | _ToSlot

encode = msgspec.msgpack.Encoder().encode
decode_from_shim = msgspec.msgpack.Decoder(FromShim).decode
decode_to_shim = msgspec.msgpack.Decoder(ToShim).decode
decode_from_agent = msgspec.msgpack.Decoder(FromAgent).decode
decode_to_agent = msgspec.msgpack.Decoder(ToAgent).decode
decode_ask = msgspec.msgpack.Decoder(PeerAsk).decode
decode_say = msgspec.msgpack.Decoder(PeerSay).decode
