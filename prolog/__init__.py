"""What slurmd runs as root before a job: admits it, or drains the node. Standard library only."""
