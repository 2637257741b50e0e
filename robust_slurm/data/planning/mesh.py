"""The ranks of a training as a mesh: which of them read the same rows, and which rows (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from robust_slurm.data.errors import DataError
from robust_slurm.resizing.dimensions import divides_data
from robust_slurm.resizing.shares import shares_of
from robust_slurm.resizing.stages import replica_of


class RankMesh:
    """Named dimensions of the ranks; the last one varies fastest, as in torch's DeviceMesh."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """Take the number of ranks along each dimension. Raises DataError."""
        for name, size in sizes.items():
            if not isinstance(name, str) or not name:
                raise DataError(f"mesh: {name!r} is not the name of a dimension")
            if type(size) is not int or size < 1:
                raise DataError(f"mesh: {name} is {size!r}; give the number of ranks along it")
        if not any(map(divides_data, sizes)):
            raise DataError(
                f"mesh: none of {', '.join(sizes) or 'no dimensions'} is data-parallel; name it dp "
                "(or dp_replicate, dp_shard), of size 1 if all ranks have the same rows"
            )
        self.sizes = dict(sizes)
        self.size = prod(sizes.values())
        """Number of ranks."""
        self.data = prod(size for name, size in sizes.items() if divides_data(name))
        """Number of shares that a step's rows are divided into."""

    def share_of(self, rank: int) -> int:
        """Return the data-parallel index of a rank."""
        return replica_of(rank, self.size, self.sizes, divides_data)[0]

    def shares(self, rank: int, size: int) -> tuple[int, ...]:
        """Return the shares of a rank in a world of ``size`` ranks.

        One if that is the mesh's size. A smaller world has fewer ranks along the first
        data-parallel dimension, and each takes over several shares, as in ``resizing.shares``.
        Raises DataError for a world that the mesh cannot be cut down to.
        """
        first = next(filter(divides_data, self.sizes))
        others = self.size // self.sizes[first]
        if size > self.size or size % others:
            text = ", ".join(f"{name} {number}" for name, number in self.sizes.items())
            raise DataError(
                f"mesh: {text} are {self.size} ranks, but this job has {size}; give its own mesh, "
                f"or run {self.size} ranks or fewer, by multiples of {others}"
            )
        here = RankMesh({**self.sizes, first: size // others})
        return shares_of(here.share_of(rank), here.data, self.data)
