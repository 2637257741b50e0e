"""The hardware of a lab's nodes: claimed as text, given to a node at boot, broken and mended."""
