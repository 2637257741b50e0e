"""The Checkpointer on a GPU."""
