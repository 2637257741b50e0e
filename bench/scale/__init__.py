"""How large a lab, a job and a cluster of real Slurm daemons may be, and what they cost."""
