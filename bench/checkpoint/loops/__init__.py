"""Random training loops that crash at a random moment."""
