"""Which page leaves a tier that is full. A policy picks the victim; `TierIndex` knows what is free, being read or written."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Literal, Protocol, TypeVar

PolicyName = Literal["lru", "arc"]
K = TypeVar("K", bound=Hashable)


class Policy(Protocol[K]):
    """The order of the keys of one tier."""

    def stored(self, key: K) -> None:
        """The key is in the tier from now on."""
        ...

    def used(self, key: K) -> None:
        """The key, which is in the tier, has been used."""
        ...

    def forgotten(self, key: K) -> None:
        """The key, which is in the tier, is not any more, and not because of `victim`."""
        ...

    def victim(self, incoming: K, stays: Callable[[K], bool]) -> K | None:
        """Take out the key that makes room for `incoming`; None: none of them may go.

        Args:
            incoming: The key that comes next.
            stays: Whether a key must not go now.
        """
        ...


class Lru(Generic[K]):
    """The least recently used key goes."""

    def __init__(self) -> None:
        self._keys = OrderedDict[K, None]()

    def stored(self, key: K) -> None:
        """The key is the newest."""
        self._keys[key] = None

    def used(self, key: K) -> None:
        """The key is the newest again."""
        self._keys.move_to_end(key)

    def forgotten(self, key: K) -> None:
        """The key has no place any more."""
        del self._keys[key]

    def victim(self, incoming: K, stays: Callable[[K], bool]) -> K | None:
        """Take out the oldest key that may go."""
        found = _first(self._keys, stays)
        if found is not None:
            del self._keys[found]
        return found


class Arc(Generic[K]):
    """The adaptive replacement cache (Megiddo and Modha, FAST '03).

    Keys that came once and keys that were used again have a list each. How much each may hold follows from the keys that return
    soon after they went. So a scan of keys that come once does not push out what is used again and again.

    Args:
        size: Keys that fit into the tier; as many that went are remembered.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._target = 0.0
        """Keys that came once and may stay; the rest is for the others."""
        self._once, self._again = OrderedDict[K, None](), OrderedDict[K, None]()
        self._gone_once, self._gone_again = OrderedDict[K, None](), OrderedDict[K, None]()

    def stored(self, key: K) -> None:
        """The key came once, or it has come back: then its kind gets more room."""
        once, again = len(self._gone_once), len(self._gone_again)
        if key in self._gone_once:
            self._target = min(float(self._size), self._target + max(1.0, again / once))
            del self._gone_once[key]
            self._again[key] = None
        elif key in self._gone_again:
            self._target = max(0.0, self._target - max(1.0, once / again))
            del self._gone_again[key]
            self._again[key] = None
        else:
            self._once[key] = None
        while len(self._once) + len(self._gone_once) > self._size and self._gone_once:
            self._gone_once.popitem(last=False)
        while len(self._gone_once) + len(self._gone_again) > self._size:
            self._gone_again.popitem(last=False)

    def used(self, key: K) -> None:
        """The key came again."""
        self._once.pop(key, None)
        self._again[key] = None
        self._again.move_to_end(key)

    def forgotten(self, key: K) -> None:
        """The key is not remembered as one that went: its content must not come back."""
        (self._once if key in self._once else self._again).pop(key)

    def victim(self, incoming: K, stays: Callable[[K], bool]) -> K | None:
        """Take out the oldest key of the kind that has more than its room, else of the other."""
        ahead = len(self._once) - self._target
        first = ahead > 0 or (ahead == 0 and incoming in self._gone_again)
        sides = [(self._once, self._gone_once), (self._again, self._gone_again)]
        for keys, gone in sides if first else reversed(sides):
            if (found := _first(keys, stays)) is not None:
                del keys[found]
                gone[found] = None
                return found
        return None


def _first(keys: OrderedDict[K, None], stays: Callable[[K], bool]) -> K | None:
    return next((key for key in keys if not stays(key)), None)
