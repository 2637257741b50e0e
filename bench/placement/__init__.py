"""The spread of groups by our placement and by others."""
