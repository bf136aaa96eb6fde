"""What is done with news of the users' resources: what is known is kept current, and who is affected is looked at. No handler
keeps state on an object."""

from collections.abc import Callable, Iterable

from penstock.operator.objects import Object
from penstock.operator.store import Key, Resources, key_of, version_of


class ResourceWatch:
    """Keeps `resources` current, and tells `changed` which keys to look at."""

    def __init__(self, resources: Resources, changed: Callable[[Key], None]) -> None:
        self._resources = resources
        self._changed = changed
        self._deleted: set[str] = set()
        """UIDs of what went since the last list began."""

    def heard(self, kind: str | None, resource: Object) -> bool:
        """Record one event of a watch. Return whether it is a repetition, which means that kopf has listed again.

        Args:
            kind: `ADDED`, `MODIFIED` or `DELETED`; None for an object of a list.
        """
        if kind == "DELETED":
            self._deleted.add(resource["metadata"]["uid"])
            self._gone(resource)
            return False
        known = self._resources.get(key_of(resource))
        repeated = kind is None and known is not None and known["metadata"]["uid"] == resource["metadata"]["uid"]
        if known is None or not repeated or version_of(known) != version_of(resource):
            self._seen(resource)
        return repeated

    def newest(self, kind: str, namespace: str | None) -> int:
        """The newest version known of a kind. Call it before a list begins: what goes meanwhile is remembered from then on."""
        self._deleted.clear()
        return max((version_of(it) for it in self._known(kind, namespace)), default=0)

    def listed(self, kind: str, namespace: str | None, items: Iterable[Object], version: int, newest: int) -> None:
        """Takes in a whole list: what it lacks has gone, unless it is newer than the list.

        Args:
            namespace: The one that was listed; None: all.
            version: The list's.
            newest: What `newest` said when the list began. A list that is older comes from a store that was put back to an
                earlier state, and what is known from after that state counts for nothing.
        """
        put_back = version < newest
        there = {it["metadata"]["uid"]: it for it in items}
        for resource in self._known(kind, namespace):
            if resource["metadata"]["uid"] not in there and (put_back or version_of(resource) <= version):
                self._gone(resource)
        for uid, resource in there.items():
            known = self._resources.get(key_of(resource))
            if uid in self._deleted or (known is not None and version_of(known) == version_of(resource)):
                continue
            if put_back:
                self._resources.drop(key_of(resource))
            self._seen(resource)

    def _known(self, kind: str, namespace: str | None) -> list[Object]:
        found = (
            self._resources.get(key) for key in self._resources.known() if key.kind == kind and namespace in (None, key.namespace)
        )
        return [it for it in found if it is not None]

    def _seen(self, resource: Object) -> None:
        key = key_of(resource)
        affected = self._affected(key)
        self._resources.put(resource)
        self._tell(key, affected)

    def _gone(self, resource: Object) -> None:
        key = key_of(resource)
        known = self._resources.get(key)
        if known is None or known["metadata"]["uid"] != resource["metadata"]["uid"]:
            return  # its name is another's by now: events of two objects come in any order
        affected = self._affected(key)
        self._resources.drop(key)
        self._tell(key, affected)

    def _tell(self, key: Key, affected: set[Key]) -> None:
        # A name that was given up is free for those who wanted it too.
        for one in affected | self._affected(key):
            self._changed(one)

    def _affected(self, key: Key) -> set[Key]:
        """The resource, its rivals for a name, and the model of an adapter: its replicas load it, its route names it."""
        model = self._resources.model_of(key)
        return {key, *self._resources.rivals(key), *([] if model is None else [model])}
