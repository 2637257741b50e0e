"""Attacks of an unprivileged user on what root runs, and on the jobs of others."""
