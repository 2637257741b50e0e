"""The plan: which data a training reads, in which mixture, and how a step is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .errors import DataError
from .lanes.order import lanes_of
from .planning import mix as mixture
from .planning.mesh import RankMesh
from .planning.planner import Rules
from .sources.listing import list_parts
from .sources.records import records

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .sample import Meta
    from .sources.base import Source

LONG = ("split", "truncate", "error")


class Plan:
    """A plan of data. The order of all samples follows from it and from a small state.

    ``sources``: corpora by name; a list of records, or a dataset, may take a source's place.
    ``mix``: their weights, a dict or a function of the step that returns one; by default all are
    alike. Weights are of tokens, and without ``pack`` of samples.

    ``batch``: rows of each data-parallel rank in a step. ``pack``: tokens of a row. Samples are
    packed into rows; ``long`` says what is done with a sample that is longer than a row: "split"
    it into pieces, "truncate" it, or "error". Without ``pack`` a row is a sample, and ``collate``
    makes a batch (a dict of arrays) of a list of samples' values; by default arrays are padded to
    the longest. ``pad``: by the arrays' names, what fills the end of a row; 0 by default.

    ``cost``: a function of a sample's Meta (``tokens``, ``ref.source``); by default its tokens.
    All data-parallel ranks get rows of about equal cost. ``fill``: samples are drawn until their
    tokens are this part of the rows' tokens. With less, costs are closer to each other.

    ``mesh``: the ranks along each dimension by name; the last varies fastest. Dimensions ``dp``
    and ``dp_…`` divide the data; ranks that differ in others (``tp``, ``pp``, ``cp``) get the same
    rows. By default all ranks of the job are data-parallel.

    ``epochs``: passes over each source; None: no end. When all sources that a function ``mix``
    names are at their end, the others are read. ``seed``: of all shuffles.

    Functions must give the same for the same arguments: all processes run them. Raises DataError.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        *,
        mix: Mapping[str, float] | Callable[[int], Mapping[str, float]] | None = None,
        cost: Callable[[Meta], float] | None = None,
        pack: int | None = None,
        long: str = "split",
        batch: int = 1,
        mesh: Mapping[str, int] | None = None,
        seed: int = 0,
        epochs: int | None = None,
        collate: Callable[[Sequence[dict[str, Any]]], Mapping[str, Any]] | None = None,
        pad: Mapping[str, float] | None = None,
        fill: float = 0.98,
    ) -> None:
        self.sources = _sources(sources)
        self.mix = _mix(mix, list(self.sources))
        self._mix_changes = callable(mix)
        self.cost = _function("cost", cost) or _tokens
        self.pack = _number("pack", pack)
        self.batch = _number("batch", batch) or 1
        self.mesh = None if mesh is None else RankMesh(dict(_mapping("mesh", mesh)))
        self.epochs = _number("epochs", epochs)
        self.collate = _function("collate", collate)
        self.pad = dict(_mapping("pad", pad or {}))
        if type(seed) is not int or not 0 <= seed < 1 << 62:
            raise DataError(f"Plan: seed is {seed!r}; give a whole number >= 0")
        self.seed = seed
        if long not in LONG:
            raise DataError(f"Plan: long is {long!r}; it is one of {', '.join(LONG)}")
        self.long = long
        if not isinstance(fill, (int, float)) or not 0.5 <= fill <= 1:
            raise DataError(f"Plan: fill is {fill!r}; give a number from 0.5 to 1")
        self.fill = float(fill)
        if self.pack is not None and self.collate is not None:
            raise DataError("Plan: collate is for batches without pack; leave one of them out")
        self._lanes: dict[str, int] = {}
        self._fingerprint: dict[str, Any] = {}

    def ranks(self, original: int) -> RankMesh:
        """Return the mesh of a job that began with ``original`` ranks."""
        return self.mesh or RankMesh({"dp": original})

    def shares(self, rank: int, size: int, original: int | None = None) -> tuple[int, ...]:
        """Return which shares of a step's rows are for this rank in a world of ``size``.

        ``original``: the ranks that the job began with, if it has fewer now. Raises DataError.
        """
        return self.ranks(original or size).shares(rank, size)

    def lanes(self) -> dict[str, int]:
        """Return the number of lanes of each source. Lists the sources' parts at the first call.

        Raises DataError; SourceStalled after a source's patience."""
        if not self._lanes:
            lanes = {}
            for name, source in self.sources.items():
                parts = list_parts(name, source)
                if not parts:
                    raise DataError(f"source {name}: there is nothing in it")
                lanes[name] = lanes_of(source.options.lanes, len(parts))
            self._lanes = lanes
        return self._lanes

    def fingerprint(self) -> dict[str, Any]:
        """Return plain values that tell the order of this plan's samples from that of others.

        The mixture, cost, batch and mesh are not among them: they may change from run to run, and
        every sample is still used once. Raises DataError.
        """
        if not self._fingerprint:
            lanes = self.lanes()
            self._fingerprint = {
                "seed": self.seed,
                "pack": self.pack or 0,
                "long": self.long if self.pack else "",
                "sources": {
                    name: {
                        "lanes": lanes[name],
                        "window": source.options.window,
                        "files": source.fingerprint(),
                    }
                    for name, source in self.sources.items()
                },
            }
        return self._fingerprint

    def identity(self) -> dict[str, Any]:
        """Return plain values that must be the same on all ranks of a run. Raises DataError."""
        mesh = {} if self.mesh is None else dict(self.mesh.sizes)
        more = {"batch": self.batch, "mesh": mesh, "fill": self.fill, "epochs": self.epochs or 0}
        return {**self.fingerprint(), **more, "samples": self._samples()}

    def _samples(self) -> int:
        """Return the records of all epochs, where each is a sample; -1 if their number is not
        known."""
        if self.pack or not self.epochs:
            return -1
        weights = {} if self._mix_changes else self.mix(0)
        read = [
            each for name, each in self.sources.items() if self._mix_changes or weights.get(name)
        ]
        numbers = [part.records for source in read for part in source.parts()]
        return -1 if min(numbers) < 0 else self.epochs * sum(numbers)

    def rules(self, shares: int) -> Rules:
        """Return the planner's rules. ``shares``: number of all shares of a step."""
        return Rules(
            self.mix, self.cost, self.pack, self.long, self.fill, self.batch, shares, self.epochs,
            self._mix_changes,
        )  # fmt: skip


def _tokens(meta: Meta) -> float:
    return meta.tokens


def _sources(sources: Any) -> dict[str, Source]:
    """Return the sources sorted by name, so that the order of the dict does not count."""
    given = _mapping("sources", sources)
    if not given:
        raise DataError("Plan: sources is empty")
    if unnamed := [name for name in given if not isinstance(name, str) or not name]:
        raise DataError(f"Plan: sources: {unnamed[0]!r} is not a name")
    return {name: _source(name, given[name]) for name in sorted(given)}


def _source(name: str, found: Any) -> Source:
    if all(hasattr(found, need) for need in ("parts", "read", "options", "fingerprint")):
        return found  # type: ignore[no-any-return]
    known = hasattr(found, "__iter__") or hasattr(found, "__getitem__")
    if isinstance(found, (str, bytes, Mapping)) or not known:
        raise DataError(
            f"Plan: source {name} is {found!r}; make one with robust_slurm.data.jsonl(), "
            "parquet() or another of its functions, or give a list or a dataset"
        )
    try:
        return records(found)
    except DataError as error:
        raise DataError(f"Plan: source {name}: {error}") from None


def _mix(mix: Any, names: list[str]) -> Callable[[int], Any]:
    if callable(mix):
        return mix  # type: ignore[no-any-return]
    weights = dict.fromkeys(names, 1.0) if mix is None else dict(_mapping("mix", mix))
    mixture.parts_of(weights, names, "Plan: mix")
    return lambda _step: weights


def _mapping(name: str, found: Any) -> Mapping[str, Any]:
    if not hasattr(found, "items") or not hasattr(found, "keys"):
        raise DataError(f"Plan: {name} is {found!r}; give a dict")
    return found  # type: ignore[no-any-return]


def _function(name: str, found: Any) -> Any:
    if found is not None and not callable(found):
        raise DataError(f"Plan: {name} is {found!r}; give a function")
    return found


def _number(name: str, found: Any) -> int | None:
    if found is not None and (type(found) is not int or not 1 <= found < 1 << 31):
        raise DataError(f"Plan: {name} is {found!r}; give a whole number >= 1")
    return found
