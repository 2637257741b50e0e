"""Faults that nobody has named: stalls, outages, pauses and users' slips, beside true faults."""
