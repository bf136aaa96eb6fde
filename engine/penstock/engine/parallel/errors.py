"""What ends a group of ranks."""


class GroupFailed(RuntimeError):
    """A rank is gone, hangs or disagrees; the message names it. The group cannot go on, whatever the step was."""


class RankRefused(GroupFailed):
    """One rank has refused bad input that the others have taken; the whole group has been ended."""
