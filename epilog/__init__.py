"""The epilog that slurmd runs as root after a job: clears leftovers, checks the node again."""
