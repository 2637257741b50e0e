"""What saving has cost this rank so far."""

from __future__ import annotations


class Stats:
    """Totals since the start of the process; times in s."""

    def __init__(self) -> None:
        self.saves = 0
        """Calls of save()."""
        self.snapshots = 0
        """Complete snapshots."""
        self.torn = 0
        """Thrown away because tensors changed while they were copied."""
        self.blocked_s = 0.0
        """Time that training stood still: in save(), and before an optimizer step."""
        self.waited_s = 0.0
        """The part of it before optimizer steps."""
        self.replica_s = 0.0
        """The part of it that waited for a replica."""
        self.copy_s = 0.0
        """Time of the copies, beside training."""
        self.last_copy_s = 0.0
        """The newest of them."""
        self.bytes = 0
        """Size of the newest snapshot."""

    def copied(self, seconds: float, size: int) -> None:
        self.snapshots += 1
        self.copy_s += seconds
        self.last_copy_s = seconds
        self.bytes = size

    def __repr__(self) -> str:
        return f"Stats({', '.join(f'{k}={v:.6g}' for k, v in vars(self).items())})"
