"""The watch for silent nodes: probe them over a second connection, and report lost ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from srun_wrapper.command.rank_env import fold_hosts
from srun_wrapper.decide.mute import mute_at, steps_on
from srun_wrapper.decide.shared_cause import Kind, SharedCauses, SharedEvent, Silence
from srun_wrapper.detect.outage import OutsideHosts, begins, ends, expires
from srun_wrapper.job.model import AgentKey, Node, Role
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.server import probe
from srun_wrapper.start_task import start_task

LATE = 0.25  # s that a report may be late, or half an interval, before it is missed
PROBE_TIMEOUT = 0.75
PROBED_AGAIN = (0.1, 0.2, 0.3, 0.4, 0.5)  # s after the first attempt: packets are lost
ASK_AGAIN = 0.5  # s until a node is probed again; a stopped robust-task accepts no connection
LESS_OFTEN = 10.0  # s of silence from which on it is probed ever less often: its queue fills up
MANY_PROBES = 64  # at a time, while all nodes are asked once at the start
UNANSWERED = 0.1  # s; a host that lives answers in a tenth of this, however busy it is
LONG = 2.0  # s of further silence after which a node may be lost although its host answers
BROKEN = 0.3  # s for a node whose connection broke to come back
TURNED_AWAY = 2  # failed probes of a node that is well: a firewall must be between
REBORN = 2.0  # s for a robust-task that died to be back
AGAIN_REFUSED = 0.25
SLEPT = 2.0  # s between two looks after which this process was stopped, or its machine paused
SETTINGS: dict[Kind, str] = {"unreachable": "outage_wait", "mute": "stall_limit"}


class NodeWatch:
    """Finds lost nodes.

    Silence is only a suspicion. A node is lost if a probe, by a second connection, fails as well,
    and no shared cause explains it. If its kernel answers, and steps show that its ranks live, it
    is waited for. ``outside``: hosts that show that the network here works.
    """

    def __init__(
        self,
        state: JobState,
        outside: OutsideHosts | None = None,
        on_shared: Callable[[str, bool], None] = lambda _text, _begins: None,
        say: Callable[[str], None] = say,
    ) -> None:
        self._state = state
        self._outside = outside or OutsideHosts()
        self._on_shared = on_shared  # gets a message, and whether a shared cause begins
        self._say = say
        self._told: dict[AgentKey, float] = {}  # last word of the silent nodes that are waited for
        self._tasks: set[asyncio.Task[None]] = set()
        self._looked: float | None = None
        self.disturbed = float("-inf")  # when a shared cause was last at work, or this slept
        config = state.config
        self._causes: SharedCauses[AgentKey] = SharedCauses(
            {"unreachable": config.outage_wait, "mute": config.stall_limit}
        )

    def doubtful(self) -> bool:
        """True if a node is silent and not judged yet."""
        now = time.monotonic()
        return any(now - n.last_word > self.patience() for n in self._state.live())

    def waiting(self) -> bool:
        """True while the job waits out a shared cause that concerns nodes with ranks."""
        nodes = self._state.nodes
        return any(
            nodes[key].role is Role.ACTIVE and nodes[key].silence is not None
            for event in self._causes.events.values()
            for key in event.nodes
        )

    def seems_shared(self, now: float) -> bool:
        """True if a shared cause is, or may be, at work."""
        return self.is_shared() or self._causes.suspected(*self._scene(now))

    def is_shared(self) -> bool:
        """True if a shared cause is at work."""
        return bool(self._causes.events)

    def patience(self) -> float:
        """Seconds of silence before a node is probed."""
        return self._state.interval + max(LATE, 0.5 * self._state.interval)

    def suspected(self, node: Node, now: float) -> bool:
        """True if this node must be probed, or is being probed."""
        return _broken(node, now) or now - node.last_word > self.patience()

    def doubted(self, node: Node, now: float) -> bool:
        """True if the node may need replacing; not if its report is late and its host answers."""
        unanswered = node.unreachable > 0 or (node.probing and now - node.asked_at > UNANSWERED)
        patience = self.patience() + (0.0 if unanswered else LONG)
        return _broken(node, now) or now - node.last_word > patience

    def steps_on(self, node: Node) -> bool:
        """True if the others step as they could not without this silent node's ranks."""
        pace = self._state.pace
        return steps_on(pace.stepped, node.last_word + self.patience(), pace.step_time())

    def look(self, now: float) -> None:
        self._notice_sleep(now)
        self._tell_back()
        for node in self._state.live():
            if node.probing or now < node.ask_again:
                continue
            first = node.second_way is None and len(self._tasks) < MANY_PROBES
            suspected = self.suspected(node, now)
            if first or suspected:
                self._start_probe(node, suspected)
        self._judge(now)

    # -- this process may have slept

    def _notice_sleep(self, now: float, most: float = SLEPT) -> None:
        before, self._looked = self._looked, now
        if before is not None and now - before > most:
            self._state.on_news(f"robust-srun was suspended for {now - before:.1f} s")
            self._begin_anew(now)

    def continued(self) -> None:
        """Handle SIGCONT: perhaps this process was stopped; Slurm sends it before signals, too."""
        self._notice_sleep(time.monotonic(), self.patience())

    def woken(self) -> None:
        """Notice a sleep before the messages are heard that have waited meanwhile: a pause of our
        own is no step's time."""
        now = time.monotonic()
        if self._looked is not None and now - self._looked > SLEPT and not self._state.ending:
            self._notice_sleep(now)

    def _begin_anew(self, now: float) -> None:
        """Count all silence from now on: this process did not run, and perhaps the job neither."""
        self.disturbed = now
        for node in self._state.live():
            node.heard(now)
            node.ask_again = 0.0
            node.closed_at = node.closed_at and now
        self._causes.slept(now)
        self._state.pace.excuse(now)

    # -- the second way: probes

    def _start_probe(self, node: Node, suspected: bool) -> None:
        node.probing, node.asked_at = True, time.monotonic()
        start_task(self._tasks, self._probe(node, suspected))

    async def _probe(self, node: Node, suspected: bool) -> None:
        before, port = node.last_word, node.hello.probe_port
        answer = await probe(node.address, port, PROBE_TIMEOUT, PROBED_AGAIN)
        node.probing = False
        now = time.monotonic()
        self._notice_sleep(now)
        silent = now - node.last_word
        if not suspected:  # the probe was only to show whether the node can be probed
            if answer == "accepted":
                node.second_way = True
            elif node.connection and silent <= self.patience():
                # With a firewall between, every delay would look like a loss: silence decides.
                node.turned_away += 1
                if node.turned_away >= TURNED_AWAY:
                    node.second_way = False
                    self._state.on_news(f"{node.name}: port {port} is {answer}, yet it reports")
            return
        if node.last_word > before or node.gone:
            return
        if node.second_way is False or (node.second_way is None and node.turned_away):
            answer = "accepted"
        if node.unreachable and answer != "unreachable":
            node.reachable_at = now
        node.unreachable = node.unreachable + 1 if answer == "unreachable" else 0
        node.silence = None
        enough = 1 if node.second_way else 2  # once more where it has never answered
        if answer == "refused":
            node.refused, node.refused_at = True, node.refused_at or now
            if now - node.refused_at < REBORN:
                node.ask_again = now + AGAIN_REFUSED  # its guardian may start it again
                return
            node.ours = True
            where = f"{node.address}:{port}"
            self._state.lose(node, f"its robust-task is gone ({where} refuses connections)")
        elif answer == "unreachable":
            proven = node.asked_at if node.unreachable >= enough else None
            node.silence = Silence("unreachable", node.last_word, proven)
        else:
            node.ask_again = now + ASK_AGAIN * max(1.0, silent / LESS_OFTEN)
            if silent > LONG:
                # After an outage its agent must have had time to connect anew.
                mute = self._mute(node, now, max(before, node.reachable_at))
                node.silence = Silence("mute", node.last_word, node.asked_at if mute else None)
        self._judge(now)

    # -- the verdict

    def _mute(self, node: Node, now: float, heard: float) -> bool:
        """True if the node is lost though its kernel answers; ``heard``: when it last spoke."""
        state, config = self._state, self._state.config
        limit, longest = max(config.mute_limit, 4 * state.interval), config.stall_limit
        stepped, unusual = state.pace.stepped, state.pace.locate_after()
        others = (rank for rank in state.world.running() if rank.node is not node)
        if node.role is not Role.ACTIVE:
            stepped, unusual = heard, 0.0
        elif state.stopped() or not node.second_way:
            unusual = 0.0
        elif state.world.is_ending() or not any(rank.beats for rank in others):
            unusual = None
        left = mute_at(heard, stepped, unusual, limit, longest) - now
        if left < 0:
            return True
        stepping = unusual is not None and self.steps_on(node)
        if (stepping or left > LONG) and now - heard > limit and node.key not in self._told:
            self._told[node.key] = node.last_word
            lives, until = "the job steps on", ""
            if not stepping:
                lives, until = "the node's kernel answers", f" up to {left:.0f} s more"
            self._say(
                f"robust-task on {node.name} has been silent for {now - node.last_word:.0f} s, but "
                f"{lives}: waiting for it{until}. Look there with `ps -eo pid,stat,args | grep "
                "agent.task`; state T is stopped, `kill -CONT PID` continues it"
            )
        return False

    def _tell_back(self) -> None:
        for key, word in list(self._told.items()):
            node = self._state.nodes[key]
            if node.gone or node.last_word > word:
                del self._told[key]
            if not node.gone and node.last_word > word:
                self._say(f"{node.name} is heard again after {node.last_word - word:.0f} s")

    def _judge(self, now: float) -> None:
        silent, keys, own, answered = self._scene(now)
        if not silent and not self._causes.events:
            return
        if silent and all(key in silent for key in keys if key != own):
            self._outside.ask(since=max(s.since for s in silent.values()))
        before = dict(self._causes.events)
        verdicts = self._causes.judge(now, silent, keys, own, answered)
        self._tell(before, now)
        for key, verdict in verdicts.items():
            if verdict != "wait":
                node = self._state.nodes[key]
                if verdict == "lost" and key == own:
                    why = f"no report for {now - node.last_word:.1f} s, yet robust-srun runs there"
                    self._state.lose_silent(node, why, shared=True)  # no evidence against the node
                else:
                    self._give_up(node, now, shared=verdict == "replace")
        if self.waiting():
            self.disturbed = now
            self._state.pace.excuse(now)

    def _scene(
        self, now: float
    ) -> tuple[dict[AgentKey, Silence], list[AgentKey], AgentKey | None, float]:
        """Return what a verdict needs: silent nodes, all nodes, robust-srun's, outside contact."""
        live = self._state.live()
        silent = {n.key: s for n in live if (s := self._silence(n, now)) is not None}
        here = self._state.own_node
        own = next((n.key for n in live if n.name == here and not n.standby_request), None)
        return silent, [n.key for n in live], own, self._outside.answered

    def _silence(self, node: Node, now: float) -> Silence | None:
        """Return the node's silence; a host that has not answered a probe yet counts as silent."""
        unanswered = node.probing and now - node.asked_at > UNANSWERED
        if node.silence is None and node.second_way and unanswered and self.suspected(node, now):
            return Silence("unreachable", node.last_word)
        return node.silence

    def _give_up(self, node: Node, now: float, *, shared: bool) -> None:
        silent, where = now - node.last_word, f"{node.address}:{node.hello.probe_port}"
        mute = node.silence is not None and node.silence.kind == "mute"
        if not mute:
            times = node.unreachable * (1 + len(PROBED_AGAIN))
            why = f"no report for {silent:.1f} s and {times} probes of {where} unanswered"
        elif node.second_way:
            why = f"no report for {silent:.1f} s, yet its kernel answers: all processes stopped?"
        else:
            why = f"no report for {silent:.1f} s and {where} cannot be probed (a firewall?)"
        if shared:
            why += "; it shares the cause with other nodes"
        self._state.lose_silent(node, why, shared=shared or mute)  # mute: no evidence against it

    def _tell(self, before: Mapping[Kind, SharedEvent[AgentKey]], now: float) -> None:
        for kind, event in self._causes.events.items():
            if kind not in before:
                limit, setting = self._causes.limits[kind], SETTINGS[kind]
                self._on_shared(begins(event, self._names(event), limit, setting), True)
            elif event.expired and not event.told:
                event.told = True
                self._on_shared(expires(event, self._names(event), now), False)
        for kind, event in before.items():
            if kind not in self._causes.events and not event.told:
                self._on_shared(ends(event, self._names(event), now), False)

    def _names(self, event: SharedEvent[AgentKey]) -> str:
        silent = [n for n in self._state.nodes.values() if n.key in event.nodes]
        return fold_hosts(
            [n.name for n in sorted(silent, key=lambda n: (n.standby_request, n.key[2]))]
        )


def _broken(node: Node, now: float) -> bool:
    """True if the node's connection has been closed for more than ``BROKEN`` seconds."""
    return node.closed_at is not None and now - node.closed_at > BROKEN
