"""The records that robust-status reads, written as the job goes: roster, progress, incidents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from robust_slurm.state_dir.ledger import JobLedger
from srun_wrapper.decide.incident import RECOVERED, Incident
from srun_wrapper.job.reporting.chronicle import Chronicle
from srun_wrapper.job.reporting.on_incident import IncidentCommands
from srun_wrapper.job.reporting.phase import Phase
from srun_wrapper.job.reporting.report import Account, roster
from srun_wrapper.job.state import JobState

Saved = Callable[[], dict[str, Any] | None]


class JobRecords:
    """Writes the job's records, and has the commands of ``on_incident`` run."""

    def __init__(
        self, state: JobState, ledger: JobLedger, phase: Phase, env: Mapping[str, str]
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._phase = phase
        self._name = env.get("SLURM_JOB_NAME", "")
        self._next_roster = 0.0
        self.account = Account()
        self.chronicle = Chronicle(state, ledger, self.account, env)
        config = state.config
        self._commands = IncidentCommands((config.on_incident, config.site_on_incident))
        self.saved: Saved = lambda: None

    def incident(self, incident: Incident) -> None:
        """Record an incident that has ended."""
        self.account.incident(incident, self._state.pace.step_time())
        record = incident.record(self._state.job_id, self._state.step_id)
        self._ledger.incident(record)
        self.write_roster()
        self._tell(record, _headline(incident))

    def observed(self, record: Mapping[str, Any]) -> None:
        """Record an incident that was only seen (mode = observe)."""
        self._ledger.incident(record)
        self._tell(record, "")

    def look(self, now: float) -> None:
        """Note the first step; write the roster and a point of progress when they are due."""
        if self.account.launched is None and self._state.world.all_started():
            self.account.launched = now
        if self.account.first_step is None and self._state.progress.beats:
            self.account.first_step = now
        still = self._state.stopped() or self._phase.name != "running"
        self.account.trains(now, None if still else self._state.world.resized)
        self.chronicle.look(now)
        if now >= self._next_roster:
            self._next_roster = now + self._state.config.roster_interval
            self.write_roster()

    def write_roster(self) -> None:
        """Replace the file behind robust-status."""
        name, saved = self._name, self.saved()
        full = roster(self._state, self.account, self._phase.name, name, saved)
        self._ledger.roster(self._state.step_id, full)

    def close(self) -> None:
        """Write the last records."""
        self.write_roster()
        self.chronicle.end(self._phase.name)
        self._commands.close()
        self._ledger.close()

    def _tell(self, record: Mapping[str, Any], line: str) -> None:
        directory = str(self._ledger.dir or "")
        about = {"job_name": self._name, "records": directory, "text": line}
        self._commands.put({"version": 1, "event": "incident", **about, "incident": record})


def _headline(incident: Incident) -> str:
    if incident.outcome == RECOVERED:
        return incident.line()
    diagnosis = incident.diagnosis
    where = ",".join(diagnosis.suspects) or diagnosis.root.node or "the job"
    return f"{diagnosis.symptom.replace('_', ' ')} on {where}: {incident.outcome}"
