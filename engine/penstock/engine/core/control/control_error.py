"""The error of commands."""


class ControlError(RuntimeError):
    """A command cannot be carried out now; the message says why."""
