"""One manner for all commands: how they read options, print results and errors, and end."""

OK, NO, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: done, or the answer is yes; it failed, or the answer is no; bad input; Ctrl-C."""


def version() -> str:
    """Return the version of robust-slurm."""
    from importlib import metadata

    try:
        return metadata.version("robust-slurm")
    except metadata.PackageNotFoundError:  # a clone that is not installed
        return "(not installed)"
