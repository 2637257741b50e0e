"""The program that slurmd runs as root before a job: admits it or drains the node. Stdlib only."""
