"""Metrics by Prometheus' conventions. ``families.py`` and ``text.py`` are pure."""
