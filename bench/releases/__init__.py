"""What works on which release of Slurm: ``python -m bench.releases``."""
