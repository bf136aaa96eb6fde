"""Named ranges in a profile. They are put around methods when a profile begins and taken away when it ends: outside of profiles
they do not exist, and cost nothing."""

from collections.abc import Callable
from typing import Any

from torch.profiler import record_function


class Ranges:
    """The ranges of one profile."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def around(self, owner: Any, attribute: str, name: str) -> None:
        """Names every call of a callable attribute, such as a method, of one object."""
        self.replace(owner, attribute, named(name, getattr(owner, attribute)))

    def replace(self, owner: Any, attribute: str, value: Any) -> None:
        """Sets an attribute of one object until the end."""
        own = vars(owner)
        if attribute in own:
            before = own[attribute]
            self._undo.append(lambda: setattr(owner, attribute, before))
        else:  # its class's
            self._undo.append(lambda: delattr(owner, attribute))
        setattr(owner, attribute, value)

    def end(self) -> None:
        """Leaves every object as it was."""
        while self._undo:
            self._undo.pop()()


def named(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same callable, in a range."""

    def ranged(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return call(*args, **kwargs)

    return ranged
