"""Views of the report for a terminal: one screen, and why each restart happened. Pure."""
