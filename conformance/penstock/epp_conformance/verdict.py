"""What can come of a check, beside that it passes."""


class Failed(Exception):
    """The picker does not do what the check's statement says; the message says what it did."""


class NotApplicable(Exception):
    """The check cannot be made here; the message says why."""


def expect(kept: object, otherwise: str) -> None:
    """Raises `Failed` with the message `otherwise` unless `kept`."""
    if not kept:
        raise Failed(otherwise)
