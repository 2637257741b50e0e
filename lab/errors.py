"""The one exception of the lab: what happened, where, and what to do next."""


class LabError(Exception):
    """A lab could not do what was asked; the message is fit to be shown to the user as it is."""
