"""Random plans against the reference: what each rank gets, over restarts and changes of ranks.

A plan without an end makes some steps, and is then given as many epochs as it has begun, so that
the same can be said of it in the end as of any other.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.common import Results
from bench.data.drawn import PER_SOURCE, SPAN, DrawnPlan, draw, sources_of, write
from bench.data.faults import seen
from bench.data.reference import Piece, may_be_lost, shares_of, wanted
from robust_slurm import data
from robust_slurm.data.errors import DataError, EndOfData
from robust_slurm.data.steps import LocalSteps

PLANS = 300
MOST_STEPS = 3000
Rows = Mapping[int, Mapping[str, Any]]


class Wrong(Exception):
    """A plan gave something else than the reference."""


def random_plans(results: Results) -> None:
    """Count the plans that are wrong; each is named in the settings by its seed."""
    plans = results.runs or (12 if results.quick else PLANS)
    wrong = [seed for seed in range(plans) if not is_right(seed)]
    results.count("exact.wrong", len(wrong))
    results.count("exact.plans", plans)
    if wrong:
        results.settings["exact.wrong seeds"] = ", ".join(map(str, wrong))


def is_right(seed: int) -> bool:
    """Run the plan of a seed; print what is wrong."""
    drawn = draw(seed)
    folder = Path(tempfile.mkdtemp(prefix="robust-plans-"))
    try:
        write(drawn, folder)
        with contextlib.redirect_stderr(io.StringIO()):  # lines about bad records, and the end
            Trial(drawn, folder).run()
    except Exception as error:  # noqa: BLE001 - any error of a plan is a wrong plan
        print(f"plan {seed} is wrong: {type(error).__name__}: {error}\n  {drawn_text(drawn)}")
        if not isinstance(error, Wrong):
            traceback.print_exc(file=sys.stdout)
        return False
    finally:
        shutil.rmtree(folder)
    return True


def drawn_text(drawn: DrawnPlan) -> str:
    """Return the plan in one line."""
    sources = {
        name: {**corpus, "parts": [len(part) for part in corpus["parts"]], "rows": "…"}
        for name, corpus in drawn.corpora.items()
    }
    shown = {k: v for k, v in vars(drawn).items() if k not in ("corpora", "documents")}
    return f"{shown} {sources}"


class Trial:
    """A training of a drawn plan, all of its ranks."""

    def __init__(self, drawn: DrawnPlan, folder: Path) -> None:
        self.drawn = drawn
        self.folder = folder
        self.found: Counter[Piece] = Counter()
        self.state: Any = None
        self.steps = 0

    def run(self) -> None:
        """Train, restart, and train to the end. Raises Wrong."""
        drawn, after = self.drawn, None
        for ranks, steps in zip(drawn.ranks, drawn.steps, strict=False):
            with self.opened(ranks, drawn.epochs) as made:
                if not self.train(made, ranks, steps, after):
                    return self.compare(ranks, self.epochs())
                self.one_rank(ranks)
                after = self.look(made, ranks) if self.steps else None
        ranks, epochs = drawn.ranks[-1], self.epochs()
        with self.opened(ranks, epochs) as made:
            if not self.train(made, ranks, MOST_STEPS, after if drawn.epochs else None):
                return self.compare(ranks, epochs)
        raise Wrong(f"no end after {MOST_STEPS} steps")

    @contextlib.contextmanager
    def opened(self, ranks: int, epochs: int | None) -> Iterator[LocalSteps]:
        """Give the steps of all ranks from the state on, as a program that begins anew has them."""
        plan = self.drawn.plan(sources_of(self.drawn, self.folder), ranks, epochs)
        made = LocalSteps(plan, range(ranks), ranks)
        try:
            made.seek(json.loads(json.dumps(self.state)))
            yield made
        finally:
            made.close()

    def epochs(self) -> int:
        """Return the epochs of a plan with an end; without, those that have begun in any source."""
        if self.drawn.epochs:
            return self.drawn.epochs
        sources = self.state["sources"].values() if self.state else []
        return max([1, *(int(each["epoch"]) + 1 for each in sources)])

    def train(self, made: LocalSteps, ranks: int, steps: int, after: Any) -> bool:
        """Take so many steps. Return False at the end. ``after``: what the first one must be, on
        how many ranks."""
        for _ in range(steps):
            try:
                number, rows, self.state = made.next()
            except EndOfData:
                if made._plan.epochs is None:
                    raise Wrong(f"a plan without an end ends after step {self.steps}") from None
                return False
            except DataError as error:
                if self.steps or not str(error).startswith("too few samples"):
                    raise
                return False
            if number != self.steps:
                raise Wrong(f"step {number} after {self.steps} steps")
            if after is not None and after[0] == ranks and after[1] != seen_digests(rows):
                raise Wrong(f"step {number} is another one after a restart")
            after = None
            self.steps += 1
            self.found.update(self.pieces(rows, ranks))
            self.passes()
            if made._plan.epochs is None and self.drawn.mix in ("alike", "constant"):
                self.mixture()
        return True

    def look(self, made: LocalSteps, ranks: int) -> Any:
        """Return what the next step is, which a restart of as many ranks must come to."""
        with contextlib.suppress(EndOfData):
            return ranks, seen_digests(made.next()[1])
        return None

    def pieces(self, rows: Rows, ranks: int) -> list[Piece]:
        """Return all pieces of a step's rows. Raises Wrong if a rank has none."""
        found = []
        for share in range(ranks):
            mine = pieces_of(rows[share], self.drawn)
            if not mine or (not self.drawn.pack and len(mine) != self.drawn.batch):
                raise Wrong(f"rank {share} of {ranks} has {len(mine)} samples")
            found += mine
        return found

    def passes(self) -> None:
        """Raise Wrong if a document of a source was drawn twice before another was drawn once."""
        drawn = self.drawn
        waiting = sum(each[-1] for each in self.state["carried"])
        for name, documents in drawn.documents.items():
            once = wanted(documents, drawn.pack, drawn.long, 1)
            most = max(self.found[piece] for piece in once)
            missing = sum(max(0, most - 1 - self.found[piece]) * piece[2] for piece in once)
            if missing > waiting:
                raise Wrong(f"source {name}: {missing} tokens not read in a pass that is over")

    def mixture(self) -> None:
        """Raise Wrong if a source has given more or less than its weight says, by more than one
        document of each source and those that wait for a place."""
        drawn = self.drawn
        weights = drawn.weights() or dict.fromkeys(drawn.documents, 1.0)
        given = Counter(dict.fromkeys(weights, 0))
        for (number, _, tokens), times in self.found.items():
            given["abc"[number // PER_SOURCE]] += times * (tokens if drawn.pack else 1)
        longest = max(length for each in drawn.documents.values() for _, length in each)
        waiting = sum(each[-1] for each in self.state["carried"])
        most = waiting + len(weights) * (longest if drawn.pack else 1)
        for name, weight in weights.items():
            wish = given.total() * weight / sum(weights.values())
            if abs(given[name] - wish) > most:
                raise Wrong(f"source {name} gave {given[name]}, not {wish:.0f} ± {most}")

    def compare(self, ranks: int, epochs: int) -> None:
        """Compare all that was seen with the reference."""
        drawn = self.drawn
        should: Counter[Piece] = Counter()
        for documents in drawn.documents.values():
            should += wanted(documents, drawn.pack, drawn.long, epochs)
        lost, twice = should - self.found, self.found - should
        if twice:
            raise Wrong(f"{twice.total()} pieces too often, as {twice.most_common(3)}")
        if lost.total() > may_be_lost(ranks, drawn.batch, drawn.pack):
            raise Wrong(f"{lost.total()} of {should.total()} pieces lost, {ranks} ranks")

    def one_rank(self, ranks: int) -> None:
        """Compare what the loader of one rank gives with its rows of the first steps, in a world
        that may have become smaller; and what it gives after a save and a restart."""
        drawn = self.drawn
        chance = random.Random(drawn.seed)
        size = chance.randint(1, ranks) if drawn.inner == 1 else ranks
        rank = chance.randrange(size * drawn.inner)
        shares = shares_of(rank, drawn.inner, size, ranks)
        with self.opened(ranks, drawn.epochs) as whole:
            whole.seek(None)
            should = []
            with contextlib.suppress(EndOfData):
                for _ in range(min(4, self.steps)):
                    digests = seen_digests(whole.next()[1])
                    should += [digests[share] for share in shares]
        if len(should) < drawn.prefetched:
            return
        used = chance.randint(0, len(should) - drawn.prefetched)
        told = {"RANK": str(rank), "WORLD_SIZE": str(size * drawn.inner), "ROBUST_RESIZED": ""}
        if size < ranks:
            told["ROBUST_RESIZED"] = f"{ranks}:{size}"
        with environment(told):
            before, state = self.batches(None, used + drawn.prefetched)
            after, _ = self.batches(json.loads(json.dumps(state)), len(should) - used)
        if [sorted(before), sorted(after)] != [
            sorted(should[: used + drawn.prefetched]),
            sorted(should[used:]),
        ] or (drawn.threads == 1 and before[:used] + after != should):
            raise Wrong(f"rank {rank} of {size * drawn.inner} (first {ranks}) has other batches")

    def batches(self, state: Any, count: int) -> tuple[list[str], Any]:
        """Return digests of so many batches of this process's rank, and the state after them."""
        drawn = self.drawn
        ranks = os.environ["ROBUST_RESIZED"].partition(":")[0] or os.environ["WORLD_SIZE"]
        plan = drawn.plan(sources_of(drawn, self.folder), int(ranks) // drawn.inner, drawn.epochs)
        loader = data.Loader(plan, ahead=drawn.ahead, prefetched=drawn.prefetched)
        try:
            if state is not None:
                loader.load_state_dict(state)
            found = taken(loader, count, drawn.threads)
            return [seen({0: arrays}).digests[0] for arrays in found], loader.state_dict()
        finally:
            loader.close()


def taken(loader: data.Loader, count: int, threads: int) -> list[dict[str, Any]]:
    """Return so many batches of a loader, which that many threads have asked for."""
    found: list[dict[str, Any]] = []
    failed: list[BaseException] = []
    tickets = iter(range(count))

    def take() -> None:
        try:
            for _ in tickets:
                found.append({name: array.numpy() for name, array in next(loader).items()})
        except BaseException as error:  # noqa: BLE001 - raised again below
            failed.append(error)

    helpers = [threading.Thread(target=take) for _ in range(threads)]
    for helper in helpers:
        helper.start()
    for helper in helpers:
        helper.join()
    if failed:
        raise failed[0]
    return found


def seen_digests(rows: Rows) -> dict[int, str]:
    """Return a digest of each share's rows."""
    return seen(rows).digests


def pieces_of(arrays: Mapping[str, Any], drawn: DrawnPlan) -> list[Piece]:
    """Return the pieces of documents in a rank's rows. Raises Wrong if their tokens are not those
    of the document, or what tells the documents apart is wrong."""
    found: list[Piece] = []
    for row, tokens in enumerate(arrays["tokens"]):
        if drawn.pack is None:
            found.append(_piece(tokens[: arrays["lengths"][row]], 0))
            rest = tokens[arrays["lengths"][row] :]
        else:
            ids = arrays["document_ids"][row]
            for number in range(int(ids.max()) + 1):
                here = ids == number
                found.append(_piece(tokens[here], int(arrays["position_ids"][row][here][0])))
            rest = tokens[ids < 0]
        if (rest != -1).any():
            raise Wrong("padding is not what pads")
    if drawn.pack is not None:
        bounds = arrays["cu_seqlens"].tolist()
        if sorted(set(bounds)) != bounds or bounds[-1] != arrays["tokens"].size:
            raise Wrong("cu_seqlens is no list of bounds")
    return found


def _piece(tokens: Any, first: int) -> Piece:
    number = int(tokens[0]) // SPAN
    begin = number * SPAN + first
    if tokens.tolist() != list(range(begin, begin + len(tokens))):
        raise Wrong(f"tokens of document {number} are not its own: {tokens[:8]} …")
    return number, first, len(tokens)


@contextlib.contextmanager
def environment(told: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a while."""
    before = dict(os.environ)
    os.environ.update(told)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
