"""The constructor: makes the arrays of a share's rows from samples.

Packed rows have the arrays of the samples, and three more, named as others name them:

- ``position_ids`` [batch, pack], int32: the position in the document; 0 in padding. A piece of
  a document that was split begins where the piece before it ended.
- ``document_ids`` [batch, pack], int32: numbers the row's documents from 0 on; -1 in padding.
- ``cu_seqlens`` [n + 1], int32: where each document begins in the flattened rows, and the end of
  the last; a row's padding counts as one more document.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .arrays import as_array, tokens_of
from .errors import DataError
from .planning.planner import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from .plan import Plan
    from .planning.planner import Rows
    from .sample import Meta, Sample

    Allocate = Callable[[str, "tuple[int, ...]", Any], Any]
    """Returns a C-contiguous array of this name, shape and dtype; whatever it holds."""

MADE = ("position_ids", "document_ids", "cu_seqlens")


def construct(
    plan: Plan, rows: Rows, samples: Mapping[Any, Sample], allocate: Allocate | None = None
) -> dict[str, Any]:
    """Return the arrays of these rows by name. ``samples``: those of the rows, by their whole
    sample's Ref. Raises DataError."""
    import numpy as np

    make: Allocate = allocate or (lambda _name, shape, dtype: np.empty(shape, dtype))
    if plan.pack:
        return _packed(rows, samples, plan.pack, plan.pad, make)
    metas = [meta for row in rows for meta in row]
    if plan.collate is None:
        return _padded([_arrays(meta, samples) for meta in metas], metas, plan.pad, make)
    made = plan.collate([samples[meta.ref.whole].values for meta in metas])
    if not hasattr(made, "items"):
        raise DataError(f"collate() returned {type(made).__name__}; return a dict of arrays")
    return {str(name): _copied(str(name), value, make) for name, value in made.items()}


def _arrays(meta: Meta, samples: Mapping[Any, Sample]) -> Mapping[str, Any]:
    """Return a sample's values with tensors as arrays. Raises DataError."""
    values = samples[meta.ref.whole].values
    try:
        return {name: as_array(value) for name, value in values.items()}
    except (TypeError, RuntimeError) as error:  # bfloat16; on a device; sparse
        raise DataError(f"{describe(meta)}: a value cannot become an array: {error}") from error


def _packed(
    rows: Rows, samples: Mapping[Any, Sample], pack: int, pad: Mapping[str, float], make: Allocate
) -> dict[str, Any]:
    import numpy as np

    metas = [meta for row in rows for meta in row]
    tokens = [meta.tokens for meta in metas]
    refs = [meta.ref for meta in metas]
    begins = [ref.piece * pack for ref in refs]
    wholes = [ref.whole for ref in refs] if any(begins) else refs
    values: list[Mapping[str, Any]] = [samples[ref].values for ref in wholes]
    columns = {} if any(begins) else _alike(values, tokens)
    if columns:
        fields = {name: column[0].dtype for name, column in columns.items()}
    else:
        values = [_arrays(meta, samples) for meta in metas]
        fields = _fields(metas, values, pack)
        places = list(zip(values, begins, tokens))  # noqa: B905 - Python 3.9
        for name in fields:
            columns[name] = [each[name][begin : begin + n] for each, begin, n in places]
    fills = {name: _fill(name, dtype, pad) for name, dtype in fields.items()}
    _known(pad, fields)
    batch = {name: make(name, (len(rows), pack), dtype) for name, dtype in fields.items()}
    positions, documents = (make(name, (len(rows), pack), np.dtype(np.int32)) for name in MADE[:2])
    pieces: dict[str, list[Any]] = {name: [] for name in fields}
    lengths: list[int] = []  # of the documents, and of each row's padding as one more
    firsts: list[int] = []  # positions of their first tokens in their documents
    numbers: list[int] = []  # of the documents in their rows
    padding: list[tuple[int, int]] = []  # of rows that have some: the row, and where it begins
    done = 0
    for at, row in enumerate(rows):
        here = slice(done, done + len(row))
        done += len(row)
        rest = pack - sum(tokens[here])
        for name, found in pieces.items():
            found += columns[name][here]
            if rest:
                found.append(np.full(rest, fills[name], fields[name]))
        lengths += tokens[here]
        firsts += begins[here]
        numbers += range(len(row))
        if rest:
            padding.append((at, pack - rest))
            lengths.append(rest)
            firsts.append(0)
            numbers.append(-1)
    for name, found in pieces.items():
        np.concatenate(found, out=batch[name].reshape(-1))
    ends = np.cumsum(lengths)
    begun = ends - lengths
    shift = (begun - firsts).astype(np.int32)
    whole = np.arange(ends[-1], dtype=np.int32)
    np.subtract(whole, np.repeat(shift, lengths), out=positions.reshape(-1))
    documents.reshape(-1)[:] = np.repeat(np.asarray(numbers, dtype=np.int32), lengths)
    for at, begin in padding:
        positions[at, begin:] = 0
    batch[MADE[0]], batch[MADE[1]] = positions, documents
    bounds = np.append(begun, ends[-1]).astype(np.int32)
    batch[MADE[2]] = _copied(MADE[2], bounds, make)
    return batch


def _alike(values: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> dict[str, list[Any]]:
    """Return the samples' arrays by name if all have arrays of the same names, types and of just
    these lengths, as they nearly always have; else {}: then each is to be looked at."""
    import numpy as np

    found: dict[str, list[Any]] = {}
    if len(set(map(len, values))) != 1:
        return found
    for name in sorted(values[0]):
        column: list[Any] = [each.get(name) for each in values]
        if set(map(type, column)) != {np.ndarray}:
            return {}
        dtype = column[0].dtype
        same = all(each.dtype is dtype and each.ndim == 1 for each in column)
        if not same or not dtype.isnative or list(map(len, column)) != lengths or name in MADE:
            return {}
        found[name] = column
    return found


def _fields(
    metas: Sequence[Meta], samples: Sequence[Mapping[str, Any]], pack: int
) -> dict[str, Any]:
    """Return the arrays' names and a dtype that all samples' values fit in. Raises DataError."""
    import numpy as np

    dtypes: dict[str, Any] = {}
    first = True
    for meta, values in zip(metas, samples):  # noqa: B905 - Python 3.9
        length = tokens_of(values)
        for name, value in values.items():
            if getattr(value, "ndim", 0) != 1 or len(value) != length:
                raise DataError(
                    f"{describe(meta)}: {name!r} is no array of one dimension and of {length} "
                    "tokens, as its others; only such arrays can be packed"
                )
        _as_planned(meta, length, pack)
        if not first and dtypes.keys() != values.keys():
            raise DataError(
                f"{describe(meta)} has {_names(values)}, other samples have {_names(dtypes)}; "
                "samples that are packed together need arrays of the same names"
            )
        for name, value in values.items():
            known = dtypes.get(name, value.dtype)
            if not (known is value.dtype and known.isnative):
                known = np.result_type(known, value.dtype)
            dtypes[name] = known
        first = False
    if taken := [name for name in MADE if name in dtypes]:
        raise DataError(f"samples have an array {taken[0]!r}; packing makes one of this name")
    return {name: dtypes[name] for name in sorted(dtypes)}


def _as_planned(meta: Meta, length: int, pack: int) -> None:
    """Raise DataError if a sample's arrays are not as long as when its place was planned."""
    end = meta.ref.piece * pack + meta.tokens
    if end > length or (meta.tokens < pack and end != length):
        raise DataError(
            f"{describe(meta)} has {length} tokens now, and had another number when it was read "
            "before: decode must return the same for the same record"
        )


def _known(pad: Mapping[str, float], there: Collection[str]) -> None:
    if unknown := [name for name in pad if name not in there]:
        raise DataError(f"pad: {unknown[0]!r} is none of the arrays ({_names(there)})")


def _fill(name: str, dtype: Any, pad: Mapping[str, float]) -> Any:
    """Return what fills an array's end. Raises DataError if the array's dtype cannot hold it."""
    import numpy as np

    value = pad.get(name, 0)
    if dtype.kind in "iu" and not (
        np.iinfo(dtype).min <= value <= np.iinfo(dtype).max and value == int(value)
    ):
        raise DataError(f"pad: {value!r} does not fit into {name!r}, an array of {dtype}")
    return value


def _padded(
    values: Sequence[Mapping[str, Any]],
    metas: Sequence[Meta],
    pad: Mapping[str, float],
    make: Allocate,
) -> dict[str, Any]:
    """Return arrays with a first dimension of samples. Arrays of one dimension are padded to the
    longest, and ``lengths`` says how long each sample is."""
    import numpy as np

    batch: dict[str, Any] = {}
    for meta, each in zip(metas, values):  # noqa: B905 - Python 3.9
        if each.keys() != values[0].keys():
            raise DataError(
                f"{describe(meta)} has {_names(each)}, other samples have {_names(values[0])}: "
                "pass Plan a function collate= that makes the batch"
            )
    _known(pad, values[0])
    for name in sorted(values[0]):
        arrays = [np.asarray(each[name]) for each in values]
        shapes = {array.shape for array in arrays}
        dtypes = [array.dtype for array in arrays]
        dtype = np.result_type(*(dtypes if len(set(dtypes)) > 1 else dtypes[:1]))
        if dtype.hasobject or (len(shapes) > 1 and {len(shape) for shape in shapes} != {1}):
            raise DataError(
                f"{name!r} is not an array of numbers, or differs in shape from sample to sample: "
                "pass Plan a function collate= that makes the batch"
            )
        if len(shapes) == 1:
            batch[name] = make(name, (len(arrays), *arrays[0].shape), dtype)
            for at, array in enumerate(arrays):
                batch[name][at] = array
            continue
        longest = max(len(array) for array in arrays)
        fill = _fill(name, dtype, pad)
        batch[name] = made = make(name, (len(arrays), longest), dtype)
        made[...] = fill
        for row, array in zip(made, arrays):  # noqa: B905 - Python 3.9
            row[: len(array)] = array
    if "lengths" not in batch:
        lengths = np.asarray([meta.tokens for meta in metas], dtype=np.int32)
        batch["lengths"] = _copied("lengths", lengths, make)
    return batch


def _copied(name: str, value: Any, make: Allocate) -> Any:
    import numpy as np

    array = np.asarray(value)
    if array.dtype.hasobject:
        raise DataError(f"collate() returned a {type(value).__name__} as {name!r}: no array")
    made = make(name, array.shape, array.dtype)
    made[...] = array
    return made


def _names(values: Collection[str]) -> str:
    return ", ".join(sorted(values)) or "no arrays"
