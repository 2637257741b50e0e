"""Single records of a durable checkpoint's data files, as torch.save wrote them. Needs torch."""

from __future__ import annotations

import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from ...format.dtypes import TORCH
from ...format.layout import Entry
from ..files import DurableError, explain, open_inside
from ..parts import FileSpan, Outline, Part


class UnreadTypeError(DurableError, ValueError):
    """A record holds what torch.load does not read with ``weights_only``, its default."""


def read_tensor(where: Path, part: Part | Outline, entry: Entry, place: FileSpan) -> torch.Tensor:
    """One block, in memory of its own. Raises DurableError."""
    found = read_value(where, part, place, entry.name)
    if (
        not isinstance(found, torch.Tensor)
        or found.dtype != TORCH[entry.dtype]
        or tuple(found.shape) != entry.shape
    ):
        raise DurableError(f"{where}: the record of {entry.name} is not the tensor that was saved")
    return found


def loads(raw: BytesIO, name: str) -> Any:
    """Unpickle without running anything. Raises ValueError."""
    try:
        return torch.load(raw, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as err:
        raise UnreadTypeError(
            f"{name} is of a type that is not loaded: {str(err).splitlines()[0]}"
        ) from None


def read_value(where: Path, part: Part | Outline, place: FileSpan, name: str) -> Any:
    """One plain value. Raises DurableError."""
    file = part.files[place.file].name
    try:
        with open(open_inside(where, file), "rb", buffering=0) as data:
            data.seek(place.offset)
            raw = BytesIO(data.read(place.length))
        return loads(raw, name)
    except UnreadTypeError as err:
        raise UnreadTypeError(f"reading {name} from {where / file}: {err}") from None
    except OSError as err:
        raise DurableError(explain(err, f"reading {name}", where / file)) from None
    except (RuntimeError, ValueError, EOFError) as err:
        raise DurableError(f"reading {name} from {where / file}: {err}") from None
