"""The ways to save a state: ours, torch's, and those of others."""
