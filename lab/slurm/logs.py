"""Complaints in the logs of a lab, for an error text (the logs go when the lab goes)."""

from lab.spec import LabSpec

_BAD = ("error", "fatal", "Traceback")
_HARMLESS = ("mpi", "MPI", "pam_slurm_adopt", "state file", "state save file", "not recommended")


def complaints(spec: LabSpec, at_most: int = 8) -> str:
    """The last lines with an error in them from each log, or "" if there are none."""
    found: list[str] = []
    for path in sorted((spec.dir / "log").glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()
        bad = [line for line in lines if _has(line, _BAD) and not _has(line, _HARMLESS)]
        found += [f"  {path.name}: {line[:300]}" for line in bad[-3:]]
    return "".join(f"\n{line}" for line in found[-at_most:])


def _has(line: str, words: tuple[str, ...]) -> bool:
    return any(word in line for word in words)
