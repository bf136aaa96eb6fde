"""Owners of names: models by their served names and aliases, adapters by theirs. Also the canaries of each model."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import NamedTuple

from penstock.api.fleet import Adapter, Fleet, Model, NameConflict

MAX_COMPARED = 2_000
"""Names that one unknown name is compared with."""
MAX_SAID = 10
"""Names that an error lists."""
MAX_ECHO = 128
"""Characters of a client's name that an error repeats."""


class Named(NamedTuple):
    """What a name stands for."""

    model: Model
    adapter: Adapter | None = None

    @property
    def name(self) -> str:
        """What engines call it."""
        return self.model.name if self.adapter is None else self.adapter.served_names[0]

    @property
    def created(self) -> float:
        """Unix time."""
        return (self.adapter or self.model).created


class Names:
    """The names of a fleet. Of several claims to one name the oldest holds."""

    def __init__(self, fleet: Fleet) -> None:
        self.models = models = {model.id: model for model in fleet.models}
        """Models by id."""
        self.orphans = [adapter for adapter in fleet.adapters if adapter.model not in models]
        """Adapters whose model is gone: they are not served, and claim nothing."""
        self.conflicts: list[NameConflict] = []
        self._named: dict[str, Named] = {}
        holders: dict[str, str] = {}
        for claimant, named in _by_age(models.values(), fleet.adapters, models):
            for name in dict.fromkeys((named.adapter or named.model).served_names):  # an alias may be the name once more
                if name in holders:
                    self.conflicts.append(NameConflict(name=name, claimant=claimant, holder=holders[name]))
                else:
                    holders[name] = claimant
                    self._named[name] = named
        self.conflicts.sort(key=lambda it: (it.name, it.claimant))
        self.idle_canaries: dict[str, str] = {}
        """Canaries that get no share, by model id, and why."""
        self._canaries: dict[str, list[Model]] = {}
        self._mains: dict[str, str] = {}
        """Model ids by those of their canaries."""
        for model in sorted(fleet.models, key=lambda it: (it.created, it.id)):
            if model.canary is not None:
                self._add_canary(model, model.canary.of)

    def _add_canary(self, model: Model, of: str) -> None:
        main = self._named.get(of)
        if main is None:
            self.idle_canaries[model.id] = f"there is no model {of!r}"
        elif main.adapter is not None:
            self.idle_canaries[model.id] = f"{of!r} is an adapter, not a model"
        elif main.model.namespace != model.namespace:
            self.idle_canaries[model.id] = f"{of!r} is served from another namespace, by {main.model.id}"
        elif main.model.id == model.id:
            self.idle_canaries[model.id] = f"{of!r} is its own name"
        else:
            self._canaries.setdefault(main.model.id, []).append(model)
            self._mains[model.id] = main.model.id

    def get(self, name: str) -> Named | None:
        """What `name` stands for."""
        return self._named.get(name)

    def items(self) -> Iterable[tuple[str, Named]]:
        """All names that are served, with what they stand for."""
        return self._named.items()

    def canaries(self, model: Model) -> list[Model]:
        """Return the canaries that share the traffic of `model`, the oldest first."""
        return self._canaries.get(model.id, [])

    def main_of(self, model: str) -> str | None:
        """The id of the model whose traffic the model of this id shares; None where it is no canary that gets any."""
        return self._mains.get(model)


def _by_age(models: Iterable[Model], adapters: Iterable[Adapter], known: dict[str, Model]) -> Iterator[tuple[str, Named]]:
    """Yield the resources that claim names, the oldest first, with the description that people know."""
    claims = [(model.created, f"InferenceModel {model.id}", Named(model)) for model in models]
    for adapter in adapters:
        if adapter.model in known:
            claims.append((adapter.created, f"LoraAdapter {adapter.id}", Named(known[adapter.model], adapter)))
    for _, claimant, named in sorted(claims, key=lambda claim: claim[:2]):
        yield claimant, named


def unknown(name: str, names: Iterable[str]) -> str:
    """The sentence that says that a model does not exist, with the names that exist: the nearest first, and not too many."""
    there = sorted(names)
    asked = name if len(name) <= MAX_ECHO else name[:MAX_ECHO] + "…"
    if not there:
        return f"model {asked!r} does not exist; there are none yet"
    near = get_close_matches(name[:MAX_ECHO], there[:MAX_COMPARED], n=3)
    listed = [*near, *(other for other in there if other not in near)][:MAX_SAID]
    more = f" and {len(there) - len(listed)} more" if len(there) > len(listed) else ""
    return f"model {asked!r} does not exist; there are: {', '.join(listed)}{more}"
