"""Facts about this robust-srun that do not change while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from srun_wrapper.command.steps import Launch


@dataclass(frozen=True, slots=True)
class JobFacts:
    """The launch, the job's id and the key of all connections. Data only."""

    launch: Launch
    job_id: int
    key: bytes

    @property
    def env(self) -> Mapping[str, str]:
        return self.launch.env

    def run_id(self, step_id: str) -> str:
        """Return the id of this step in this run of the job: a requeued job keeps its own id."""
        return f"{self.job_id}.{step_id}.{self.env.get('SLURM_RESTART_COUNT') or '0'}"

    def rank_env(self, step_id: str) -> dict[str, str]:
        """Return what every rank's environment gets besides its place in the world."""
        return {**self.launch.rank_env, "ROBUST_RUN_ID": self.run_id(step_id)}
