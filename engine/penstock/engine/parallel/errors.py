"""What ends a group of ranks."""


class GroupFailed(RuntimeError):
    """A rank is gone, hangs or disagrees; the message names it. The group cannot go on, whatever the step was."""
