"""Messages between our own processes: authenticated frames, and lines of JSON on a node."""
