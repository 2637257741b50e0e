"""Weighted average scheduling time (WAS), as ByteRobust defines it (arXiv 2509.16293). Pure.

    WAS = 0.99 * sum(b(k) T(k), k = 1..n) / sum(b(k), k = 1..n)  +  0.01 * T(32)

b(k): probability that k of N machines fail within a day, K ~ Binomial(N, p); n: the smallest pool
with P(K <= n) >= 0.99; T(k): seconds from the detection that k machines are lost until training
goes on; 32 machines go with a switch. (That the sum is divided by that of its weights, the paper
does not say.)

T(k) is put together from what bench.recovery measured; a Term says of what:

- oracle: every lost machine is replaced by a spare of the allocation: ``spare``.
- ours_spare, ours_standby: so is every one of up to n; from spares of the allocation or from the
  standby partition (``standby``). Above n the shortfall is rescheduled: its machines are as new
  to the job as those of ``reschedule``, and the others wait for them.
- ours_leased: as ours_standby, but the job has leased one machine of it, which is warm: ``leased``.
  A job has one lease: the second machine at once comes cold.
- ours_fewer: as ours_leased (without one: ours_standby), and above n the job goes on with fewer
  machines: ``fewer``. What it computes the slower until they are back is not in WAS.
- reschedule: the lost machines are allocated anew, every rank starts cold: ``reschedule``.
- requeue: the whole job goes back to the queue: ``requeue``.

T depends on k by what was measured with k > 1, and on N only by the orders to start (scaled()).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.heartbeat.load import NODES as ORDERED_NODES
from robust_slurm.config import Config
from standby.size.count import Distribution

SWITCH = 32
"""Machines that the rare catastrophe takes."""
SWITCH_WEIGHT = 0.01
LEASED, FEWER = "ours_leased", "ours_fewer"
STRATEGIES = ("oracle", "ours_spare", "ours_standby", "reschedule", "requeue")
BEFORE_START = ("decide", "stop", "replace")
START = ("restore", "launch", "first_step")
OPTIONAL = "restore"
"""Older records have no such phase: there it is part of first_step."""


class MissingError(ValueError):
    """A metric that is needed was not measured; the text says which."""


@dataclass(frozen=True, slots=True)
class Term:
    """Seconds at the median and at the 95th percentile, the fewest samples behind them, and what
    they were measured as.

    Sums and differences are taken at the medians and at the p95s: exact only if the parts are
    long and short together. Without the single runs nothing better can be said.
    """

    median: float
    p95: float
    n: int
    source: str

    def __add__(self, other: Term) -> Term:
        source = " + ".join(s for s in (self.source, other.source) if s)
        n = min(self.n, other.n)
        return Term(self.median + other.median, self.p95 + other.p95, n, source)

    def times(self, factor: float) -> Term:
        source = f"{factor:g} x {self.source}"
        return Term(factor * self.median, factor * self.p95, self.n, source)

    def less(self, other: Term) -> Term:
        source = f"{self.source} - {other.source}"
        n = min(self.n, other.n)
        return Term(self.median - other.median, self.p95 - other.p95, n, source)


@dataclass(frozen=True, slots=True)
class Times:
    """T by how a lost machine is replaced. ``spare`` and ``standby`` by how many at once.

    ``last_rung``: ours, when it finds that it cannot get all the machines: back to the queue.
    ``fewer``: then as well, but it goes on without them. ``leased``: None if not measured.
    """

    spare: Mapping[int, Term]
    standby: Mapping[int, Term]
    reschedule: Term
    requeue: Term
    last_rung: Term
    fewer: Term
    leased: Term | None = None

    def strategies(self) -> tuple[str, ...]:
        """Return those whose times are known."""
        return (*STRATEGIES, *([LEASED] if self.leased else []), FEWER)

    def ours(self) -> list[str]:
        """Return those of them that are forms of robust-srun's."""
        return [name for name in self.strategies() if name.startswith("ours_")]


Metrics = Mapping[str, Mapping[str, float]]
"""``metrics`` of bench.recovery's JSON: name → median, p95, n."""


def metric(metrics: Metrics, name: str) -> Term:
    """Return the term. Raises MissingError."""
    try:
        found = metrics[f"{name}_s"]
    except KeyError:
        raise MissingError(f"{name}_s was not measured") from None
    return Term(float(found["median"]), float(found["p95"]), int(found["n"]), name)


def phases(metrics: Metrics, case: str, names: Sequence[str]) -> Term:
    """The sum of a case's phases. Raises MissingError."""
    known = [p for p in names if p != OPTIONAL or f"{case}.{p}_s" in metrics]
    terms = [metric(metrics, f"{case}.{phase}") for phase in known]
    return Term(
        sum(t.median for t in terms),
        sum(t.p95 for t in terms),
        min(t.n for t in terms),
        f"{case}.({'+'.join(known)})" if len(known) > 1 else f"{case}.{known[0]}",
    )


def measured(metrics: Metrics, case: str) -> bool:
    return f"{case}.total_s" in metrics


def assumed(seconds: float, what: str) -> Term:
    """Return a term that nobody measured: the same at the median and at p95, and named."""
    return Term(seconds, seconds, _ANY, f"{what} {seconds:g} s" if seconds else "")


_ANY = 10**9  # an assumption has as many samples as what it is added to


def compose(metrics: Metrics, *, reinstall: float = 0.0, wait: float = 0.0) -> Times:
    """Return the measured times where there are any, else put them together. Raises MissingError.

    ``reinstall``: s until a machine from outside the pool is ready for a job; ``wait``: s that
    ours waits for machines of the standby partition before it gives up.
    """
    install = assumed(reinstall, "reinstall")
    whole, lease = (*BEFORE_START, *START), "node_crash_leased_torch"
    spare = phases(metrics, "node_crash_spare_torch", whole)
    requeue = metric(metrics, "plain_requeue.total").less(metric(metrics, "plain_requeue.detect"))
    return Times(
        spare={1: spare} | several(metrics, "node_crash_{}_spare_torch", whole),
        standby={1: _standby(metrics, whole)}
        | several(metrics, "node_crash_{}_standby_torch", whole),
        reschedule=_reschedule(metrics, whole) + install,
        requeue=requeue + install,
        last_rung=_last_rung(metrics, requeue, wait) + install,
        fewer=_fewer(metrics, wait),
        leased=phases(metrics, lease, whole) if measured(metrics, lease) else None,
    )


def _standby(metrics: Metrics, whole: Sequence[str]) -> Term:
    if measured(metrics, "node_crash_standby_torch"):
        return phases(metrics, "node_crash_standby_torch", whole)
    # An allocation takes as long whatever will run in it.
    allocation = phases(metrics, "node_crash_standby", ("replace",))
    return phases(metrics, "node_crash_spare_torch", whole) + allocation


def several(metrics: Metrics, case: str, names: Sequence[str]) -> dict[int, Term]:
    """Cases with more than one machine at once, by how many."""
    cases = {k: case.format(k) for k in range(2, SWITCH)}
    return {k: phases(metrics, c, names) for k, c in cases.items() if measured(metrics, c)}


def _reschedule(metrics: Metrics, whole: Sequence[str]) -> Term:
    """A new allocation for what is lost; all ranks start cold."""
    standby, cold = "node_crash_standby_torch", "rank_kill_torch_cold"
    if measured(metrics, f"{standby}_cold"):
        return phases(metrics, f"{standby}_cold", whole)
    if not measured(metrics, cold):  # from before there were warm starts: every start is cold
        return _standby(metrics, whole)
    swap = standby if measured(metrics, standby) else "node_crash_standby"
    return phases(metrics, swap, BEFORE_START) + phases(metrics, cold, START)


def _last_rung(metrics: Metrics, requeue: Term, wait: float) -> Term:
    """Ours too must go back to the queue in the end."""
    short = "pool_short_torch"
    if measured(metrics, short):
        return metric(metrics, f"{short}.total").less(metric(metrics, f"{short}.detect"))
    stop = phases(metrics, "node_crash_spare_torch", ("decide", "stop"))
    return stop + assumed(wait, "standby_wait") + requeue


def _fewer(metrics: Metrics, wait: float) -> Term:
    """Return the loss where Slurm gives no machine: the others start warm, without it."""
    case = "shrink" if measured(metrics, "shrink") else "node_crash_spare_torch"
    begin, end = phases(metrics, case, ("decide", "stop")), phases(metrics, case, START)
    return begin + assumed(min(wait, Config().shrink_wait), "shrink_wait") + end


def scaled(times: Times, orders: Term, machines: int) -> Times:
    """With the time that robust-srun needs to send ``machines`` machines the order to start.

    ``orders``: that for ORDERED_NODES, taken to grow with their number. What else grows was not
    measured, nor what of requeue does.
    """
    more = orders.times(machines / ORDERED_NODES)
    return replace(
        times,
        spare={k: term + more for k, term in times.spare.items()},
        standby={k: term + more for k, term in times.standby.items()},
        reschedule=times.reschedule + more,
        fewer=times.fewer + more,
        leased=times.leased + more if times.leased else None,
    )


def at_once(by: Mapping[int, Term], k: int) -> Term:
    """T for k machines: what was measured with the next number not below k, or the largest."""
    return by[min((m for m in by if m >= k), default=max(by))]


def seconds(times: Times, strategy: str, k: int, pool: int) -> Term:
    """T(k). ``pool``: how many standbys ours has."""
    if strategy == "requeue":
        return times.requeue
    if strategy == "reschedule":
        return times.reschedule
    if strategy != "oracle" and k > pool:
        return times.fewer if strategy == FEWER else times.reschedule
    if k == 1 and strategy in (LEASED, FEWER) and times.leased is not None:
        return times.leased
    return at_once(times.spare if strategy in ("oracle", "ours_spare") else times.standby, k)


def with_switch(times: Times, strategy: str, pool: int, machines_left: bool) -> Term:
    """T(32). ``machines_left``: so many others are idle; if not, only the queue is left.

    The oracle never needs them, requeue always waits for them.
    """
    if strategy in ("oracle", "requeue") or machines_left:
        return seconds(times, strategy, SWITCH, pool)
    if strategy == "reschedule":
        return times.requeue
    if strategy == FEWER:
        return seconds(times, strategy, SWITCH, pool)
    return times.last_rung if pool < SWITCH else seconds(times, strategy, SWITCH, pool)


def time_of(times: Times, strategy: str, k: int, pool: int, machines_left: bool) -> Term:
    """T(k), T(32) included."""
    if k == SWITCH:
        return with_switch(times, strategy, pool, machines_left)
    return seconds(times, strategy, k, pool)


def weights(lost: Distribution, most: int) -> dict[int, float]:
    """P(K = k | 1 <= K <= most) by k."""
    total = sum(lost.at(k) for k in range(1, most + 1))
    return {k: lost.at(k) / total for k in range(1, most + 1)}


def average(by_count: Mapping[int, float], times: Iterable[Term], switch: Term) -> Term:
    """WAS; ``times``: T(k) in the order of ``by_count``, the weights."""
    some = list(times)
    rest = 1.0 - SWITCH_WEIGHT
    pairs = list(zip(by_count.values(), some, strict=True))
    return Term(
        rest * sum(w * t.median for w, t in pairs) + SWITCH_WEIGHT * switch.median,
        rest * sum(w * t.p95 for w, t in pairs) + SWITCH_WEIGHT * switch.p95,
        min(t.n for t in [*some, switch]),
        "",
    )


def scheduling_time(
    times: Times, strategy: str, lost: Distribution, most: int, pool: int, machines_left: bool
) -> Term:
    """WAS of one strategy: 1..``most`` machines of ``lost``, with a pool of ``pool``."""
    by_count = weights(lost, most)
    each = (seconds(times, strategy, k, pool) for k in by_count)
    return average(by_count, each, with_switch(times, strategy, pool, machines_left))
