"""Merge the ranks' parts into one checkpoint: the blocks of each tensor, and its name.

Pure. Ranks of one data-parallel group each hold some row blocks of the same tensors; ranks of a
distributed tensor hold its shards; what is private is whole on every rank, and counts once where
ranks hold the same. Two pipeline stages may use one name for different tensors: the one of the
lowest rank keeps the name, the others get ``<name>@<lowest rank that has it>``.

Ranks whose parts have one form are looked at together, one column of offsets at a time: nothing is
made for each block, of which thousands of ranks have tens of millions.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from math import prod
from typing import NamedTuple

from robust_slurm.resizing.dimensions import PIPELINE

from ..format.layout import Entry
from ..planning.alike import Claim, apart
from .parts import CommonForm, FileSpan, Outline

DIFFER = "no longer hold the same state, though each has kept a part of it for all"


class Chunk(NamedTuple):
    """One rank's block of a tensor."""

    rank: int
    entry: Entry
    place: FileSpan


class Group:
    """Parts of one form."""

    def __init__(self, parts: Sequence[Outline]) -> None:
        self.parts = parts
        """The outlines, by rank."""
        self.form = parts[0].form

    @cached_property
    def _flat(self) -> array[int]:
        flat = array("q")
        for part in self.parts:
            flat.extend(part.offsets)
        return flat

    def column(self, number: int, dim: int) -> array[int]:
        """Each part's offset of one entry along a dimension."""
        cuts = self.form.cuts[number]
        if dim not in cuts:
            return array("q", bytes(8 * len(self.parts)))
        at = self.form.first[number] + cuts.index(dim)
        return self._flat[at :: len(self.form.limits)]


class Blocks(NamedTuple):
    """One tensor's blocks in parts of one form."""

    group: Group
    number: int
    """In ``form.entries``."""

    @property
    def parts(self) -> Sequence[Outline]:
        return self.group.parts

    @property
    def entry(self) -> Entry:
        """The entry, whose offsets are not those of any part."""
        return self.group.form.entries[self.number]

    def column(self, dim: int) -> array[int]:
        return self.group.column(self.number, dim)


class Whole(NamedTuple):
    """One tensor as others see it."""

    name: str
    fqn: str
    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[Blocks, ...]
    """The blocks, without empty ones."""
    path: tuple[str | int, ...]
    """Keys that lead to it in the nested state."""
    kind: str
    alias_of: str = ""
    """Name of the tensor that has this one as its second name; "" for all others."""

    @property
    def ranks(self) -> list[int]:
        return sorted(part.rank for blocks in self.blocks for part in blocks.parts)

    def chunks(self) -> Iterator[Chunk]:
        """Every block. Raises ValueError if a part is not what it should be."""
        for group, number in self.blocks:
            for part in group.parts:
                yield Chunk(part.rank, part.entry(number), part.place(number))


class Value(NamedTuple):
    """One plain value as others see it."""

    name: str
    path: tuple[str | int, ...]
    part: Outline
    number: int

    @property
    def rank(self) -> int:
        return self.part.rank

    @property
    def place(self) -> FileSpan:
        """Return the place. Raises ValueError if the part is not what it should be."""
        return self.part.place(self.number)


class Merged(NamedTuple):
    """A whole checkpoint."""

    tensors: tuple[Whole, ...]
    values: tuple[Value, ...]
    problems: tuple[str, ...]
    """Reasons why it is not complete."""
    apart: bool
    """Ranks that share a state no longer hold the same."""

    @property
    def blocks(self) -> int:
        """The number of blocks of all tensors."""
        return sum(len(b.parts) for whole in self.tensors for b in whole.blocks)


def merge(parts: Sequence[Outline]) -> Merged:
    """Merge the parts of all ranks, in the order of ranks."""
    claims = {part.rank: Claim(part.needs, part.same) for part in parts}
    strangers = apart(claims)
    differ = [f"ranks {', '.join(map(str, strangers[:16]))} {DIFFER}"] if strangers else []
    tensors, problems = _tensors(parts)
    tensors += _aliases(tensors, parts)
    return Merged(tuple(tensors), tuple(_values(parts)), (*problems, *differ), bool(strangers))


def _tensors(parts: Sequence[Outline]) -> tuple[list[Whole], list[str]]:
    named, problems, found = [], [], _collected(parts)
    taken = set(found)
    for fqn, variants in found.items():
        each = [(one, _is_grid(one)) for one in variants]
        sets = [(b, ok) for one, ok in each for b in ([one] if ok else _apart(one))]
        for number, (blocks, good) in enumerate(sorted(sets, key=lambda item: _lowest(item[0]))):
            first = min(blocks, key=lambda b: b.parts[0].rank)
            name, path = fqn, first.group.form.paths.get(fqn, (fqn,))
            if number:
                name = f"{fqn}@{_lowest(blocks)}"
                while name in taken:
                    name += "'"
                taken.add(name)
                path = (name,)
            e, full = first.entry, tuple(b for b in blocks if prod(b.entry.shape))
            full = full or (Blocks(Group(first.parts[:1]), first.number),)
            whole = Whole(name, fqn, e.dtype, e.global_shape, full, path, e.kind)
            named.append(whole)
            problem = "" if good else _incomplete(whole)
            problems += [problem] if problem else []
    return named, problems


def _aliases(tensors: Sequence[Whole], parts: Sequence[Outline]) -> list[Whole]:
    """Return the second names of tensors, each as a tensor of the same blocks."""
    by_fqn: dict[str, list[Whole]] = {}
    taken = set[str]()
    for each in tensors:
        by_fqn.setdefault(each.fqn, []).append(each)
        taken.add(each.name)
    found: list[Whole] = []
    for form, part in {part.form: part for part in reversed(parts)}.items():
        for name, (fqn, path) in form.aliases.items():
            if name in taken:
                continue
            # Stages of a pipeline may use one name for different tensors.
            known = by_fqn.get(fqn, ())
            whole = next((e for e in known if part.rank in e.ranks), next(iter(known), None))
            if whole is not None:
                taken.add(name)
                found.append(whole._replace(name=name, fqn=name, path=path, alias_of=whole.name))
    return found


def _collected(parts: Sequence[Outline]) -> dict[str, list[list[Blocks]]]:
    """Return the blocks of each tensor that has the fqn, by fqn."""
    alike: dict[tuple[CommonForm, tuple[int, ...], tuple[int, ...]], list[Outline]] = {}
    for part in parts:
        among = part.needs if part.form.shares else ()  # else each rank needs itself alone
        alike.setdefault((part.form, among, _stage(part)), []).append(part)
    # The blocks of one tensor come from ranks that need each other (shared) or stand in the same
    # stage (distributed); private ones are one if they hold the same.
    tensors: dict[str, dict[object, list[Blocks]]] = {}
    for (form, needs, stage), members in alike.items():
        group = Group(members)
        for number, entry in enumerate(form.entries):
            if entry.kind != "private":
                among = needs if entry.kind == "shared" else stage
                key = (entry.kind, among, entry.dtype, entry.global_shape)
                variants = tensors.setdefault(entry.fqn, {})
                variants.setdefault(key, []).append(Blocks(group, number))
        for number, part, content in _private(form, members):
            entry = form.entries[number]
            variants = tensors.setdefault(entry.fqn, {})
            whole = ("private", content, entry.dtype, entry.shape)
            if whole not in variants:
                variants[whole] = [Blocks(Group((part,)), number)]
    return {fqn: list(variants.values()) for fqn, variants in tensors.items()}


def _private(form: CommonForm, group: Sequence[Outline]) -> Iterator[tuple[int, Outline, object]]:
    """Number of the entry, part and content of the first of each content."""
    known: set[tuple[str, ...]] = set()
    for part in group:
        if part.contents in known:
            continue
        if part.contents and all(part.contents):
            known.add(part.contents)
        for at, number in enumerate(form.private):
            content = part.contents[at] if part.contents else ""
            yield number, part, content or part.rank


def _lowest(blocks: Iterable[Blocks]) -> int:
    return min(each.parts[0].rank for each in blocks)


def _apart(found: list[Blocks]) -> list[list[Blocks]]:
    """Split blocks that occur several times into as many tensors of one name."""
    seen: Counter[tuple[int, ...]] = Counter()
    copies: list[dict[int, list[Outline]]] = []  # by position in found
    each = [(part.rank, at, part) for at, b in enumerate(found) for part in b.parts]
    for _, at, part in sorted(each, key=lambda item: item[0]):
        entry, copy = part.entry(found[at].number), 0
        if prod(entry.shape):
            copy = seen[entry.offsets]
            seen[entry.offsets] += 1
        if copy == len(copies):
            copies.append({})
        copies[copy].setdefault(at, []).append(part)
    return [[Blocks(Group(own), found[at].number) for at, own in one.items()] for one in copies]


def _stage(part: Outline) -> tuple[int, ...]:
    """Coordinates of a rank along the mesh's pipeline dimensions."""
    rest, found = part.rank, []
    for name, size in reversed(part.mesh.items()):
        if size < 1:
            return ()
        rest, here = divmod(rest, size)
        if name in PIPELINE:
            found.append(here)
    return tuple(found)


def _incomplete(whole: Whole) -> str:
    """Reason why the blocks do not cover the tensor exactly once; "" if they do."""
    if _is_grid(whole.blocks):
        return ""
    have = sum(len(b.parts) * prod(b.entry.shape) for b in whole.blocks)
    ranks = ", ".join(map(str, whole.ranks[:8]))
    if overlap(part.entry(b.number) for b in whole.blocks for part in b.parts):
        return (
            f"blocks of {whole.name} from ranks {ranks} overlap; if they are different tensors, "
            "name the mesh's pipeline dimension `pp`"
        )
    if have != prod(whole.shape):
        return (
            f"{whole.name} is not complete: {have} of {prod(whole.shape)} elements, from ranks "
            f"{ranks}"
        )
    return ""


def _is_grid(found: Sequence[Blocks]) -> bool:
    """True if each dimension is cut into pieces and there is one block for each choice of them.

    Nearly all tensors are cut like this, and such blocks cover the tensor exactly once.
    """
    full = [b for b in found if prod(b.entry.shape)]
    count, cells = sum(len(b.parts) for b in full), 1
    dims = sorted({dim for b in full for dim in b.group.form.cuts[b.number]})
    columns = [[b.column(dim) for b in full] for dim in dims]
    for dim, column in zip(dims, columns, strict=True):
        by_size: dict[int, set[int]] = {}
        for b, offsets in zip(full, column, strict=True):
            by_size.setdefault(b.entry.shape[dim], set()).update(offsets)
        end = full[0].entry.global_shape[dim]
        starts = set().union(*by_size.values())
        # From 0 on, each piece ends where one other begins, and they have this length together.
        if sum(size * len(s) for size, s in by_size.items()) != end or 0 not in starts:
            return False
        if sum(map(len, by_size.values())) != len(starts):
            return False
        if not {at + size for size, s in by_size.items() for at in s} <= starts | {end}:
            return False
        cells *= len(starts)
    if count != cells or len(dims) < 2:
        return count == cells
    rows = zip(*(chain.from_iterable(column) for column in columns), strict=True)
    return len(set(rows)) == count


def overlap(entries: Iterable[Entry]) -> bool:
    """True if any two blocks have an element in common."""
    blocks = [e for e in entries if prod(e.shape)]
    if len(blocks) < 2:
        return False
    if not blocks[0].shape:
        return True
    dims = range(len(blocks[0].shape))
    along = max(dims, key=lambda d: len({block.offsets[d] for block in blocks}))
    blocks.sort(key=lambda block: block.offsets[along])
    active: list[Entry] = []
    for block in blocks:
        start = block.offsets[along]
        active = [a for a in active if a.offsets[along] + a.shape[along] > start]
        for other in active:
            if all(
                block.offsets[d] < other.offsets[d] + other.shape[d]
                and other.offsets[d] < block.offsets[d] + block.shape[d]
                for d in dims
            ):
                return True
        active.append(block)
    return False


def _values(parts: Sequence[Outline]) -> list[Value]:
    """Each value from the lowest rank that has it.

    Where ranks have different parameter groups (pipeline stages), their values also stand under
    each parameter's name, as torch's ``flatten_optimizer_state_dict`` asks for them:
    ``optimizer.param_groups.<parameter>.lr``.
    """
    lowest: dict[CommonForm, Outline] = {}
    for part in parts:
        lowest.setdefault(part.form, part)
    found: dict[str, Value] = {}
    for form, part in lowest.items():
        for index, (name, path) in enumerate(form.plain, len(form.entries)):
            found.setdefault(name, Value(name, path, part, index))
    if len({form.groups for form in lowest if form.groups}) > 1:
        for part in lowest.values():
            for value in _by_parameter(part):
                found.setdefault(value.name, value)
    return list(found.values())


def _by_parameter(part: Outline) -> list[Value]:
    values, form = [], part.form
    for group, params in form.groups:
        parent = group.rpartition(".")[0]
        for index, (plain, _) in enumerate(form.plain, len(form.entries)):
            key = plain[len(group) + 1 :]
            if not plain.startswith(group + ".") or key == "params":
                continue
            for fqn in params:
                name = f"{parent}.{fqn}.{key}"
                values.append(Value(name, (name,), part, index))
    return values
