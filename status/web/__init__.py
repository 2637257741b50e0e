"""``robust-status serve``: a read-only web page and metrics, on loopback unless told otherwise."""
