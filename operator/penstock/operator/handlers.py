"""The users' resources as the watches tell of them: what is known is kept current, and who is affected is looked at. No handler
keeps state on an object."""

from collections.abc import Callable

from penstock.kube.cache import Change
from penstock.kube.caches import Caches
from penstock.operator.store import Key, Resources, key_of


class ResourceWatch:
    """Keeps `resources` current, and tells `changed` which keys to look at."""

    def __init__(self, resources: Resources, changed: Callable[[Key], None]) -> None:
        self._resources = resources
        self._changed = changed

    def follow(self, cache: Caches) -> None:
        """Keeps up with the caches of one kind. Call it before they run."""
        cache.subscribe(self.seen)

    def seen(self, change: Change) -> None:
        """Takes one change in. One that was missed comes with the next list: that of an object that went meanwhile, too."""
        resource = change.new or change.old
        if resource is None:
            return
        key = key_of(resource)
        affected = self._affected(key)
        if change.new is None:
            self._resources.drop(key)
        else:
            self._resources.put(change.new)
        # A name that was given up is free for those who wanted it too.
        for one in affected | self._affected(key):
            self._changed(one)

    def _affected(self, key: Key) -> set[Key]:
        """The resource, its rivals for a name, and the model of an adapter: its replicas load it, its route names it."""
        model = self._resources.model_of(key)
        return {key, *self._resources.rivals(key), *([] if model is None else [model])}
