"""What slurmd runs as root after a job: clears its leftovers and proves the node again."""
