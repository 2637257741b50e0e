"""One manner for all commands: how they read options, print results and errors, and end."""

OK, NO, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: done, or the answer is yes; it failed, or the answer is no; bad input; Ctrl-C."""
