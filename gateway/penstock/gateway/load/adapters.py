"""The LoRA adapters of each replica, as replicas report them: the operator loads adapters after a replica is ready."""

from collections.abc import Collection

from penstock.gateway.picker.candidates import ReplicaKey


class LoadedAdapters:
    """Adapters by replica, for its present process. Reports may arrive in any order: the highest `seq` wins."""

    def __init__(self) -> None:
        self._said: dict[ReplicaKey, tuple[int, Collection[str] | None]] = {}

    def said(self, key: ReplicaKey, seq: int, adapters: Collection[str] | None) -> bool:
        """Takes in the adapters of a whole report, None where it does not say them; tells whether that is news."""
        before = self._said.get(key)
        if before is not None and seq < before[0]:
            return False
        self._said[key] = seq, adapters
        return before is None or before[1] != adapters

    def mute(self, key: ReplicaKey) -> bool:
        """`key` was asked for a report and has none; tells whether that is news."""
        if key in self._said:
            return False
        self._said[key] = -1, None
        return True

    def at(self, key: ReplicaKey, unsaid: Collection[str] | None) -> Collection[str] | None:
        """The adapters that `key` has, None where it does not say them; `unsaid` as long as it has said nothing at all."""
        return self._said[key][1] if key in self._said else unsaid

    def forget(self, key: ReplicaKey) -> None:
        """What was said was another process's, or may have been."""
        self._said.pop(key, None)
