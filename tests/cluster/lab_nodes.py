"""The nodes of a lab as Slurm gives them to a job."""

from __future__ import annotations

from lab import Lab


def hostnames(lab: Lab, nodes: int) -> list[str]:
    done = lab.exec("head", ["srun", f"-N{nodes}", "hostname"], timeout=60, check=True)
    return sorted(done.stdout.split())
