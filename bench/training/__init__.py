"""The trainings that benchmarks run: real processes in the lab, and what they write."""
