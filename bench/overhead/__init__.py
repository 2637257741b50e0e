"""The cost of robust-srun when nothing fails."""
