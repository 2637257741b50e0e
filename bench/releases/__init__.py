"""The matrix of Slurm releases and what works on each: ``python -m bench.releases``."""
