"""What the gateways say of a model: whether they know it, what they refuse, and which of its names another has."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from penstock.api.fleet import PoolsView, pool_id
from penstock.operator.store import Key


@dataclass(frozen=True)
class Routing:
    """One model, as the gateways see it."""

    asked: int = 0
    """Gateway processes that there are."""
    answered: int = 0
    ignorant: int = 0
    """Gateways that answered but do not know all of the model's pools."""
    refused: str = ""
    """What an Envoy says of the configuration that it refuses."""
    conflict: str = ""
    """Which of its names another model has, in a sentence."""

    def verdict(self, name: str) -> tuple[bool | None, str, str]:
        """Status (None: unknown), reason and message of the condition `Routed` for a served name."""
        if self.conflict:
            return False, "NameConflict", self.conflict
        if not self.asked:
            return None, "NoGateway", "there is no gateway to ask"
        if not self.answered:
            return None, "GatewaysSilent", f"none of {self.asked} gateways answers"
        if self.refused:
            return False, "ConfigurationRefused", f"an Envoy refuses its configuration: {self.refused}"
        if self.ignorant:
            words = f"{self.ignorant} of {self.answered} gateways do not know it yet"
            return (False if self.ignorant == self.answered else None), "NotRoutedYet", words
        silent = f"; {self.asked - self.answered} more do not answer" if self.asked > self.answered else ""
        return True, "Routed", f"{self.answered} of {self.asked} gateways send requests for {name!r} here{silent}"


class Routes:
    """The gateways' last answers to `/pools`."""

    def __init__(self, changed: Callable[[Iterable[Key] | None], None]) -> None:
        """
        Args:
            changed: Called with the models whose answers changed; None: all models.
        """
        self._changed = changed
        self._asked = 0
        self._pools: list[dict[str, str]] = []
        """For each gateway that answered: by pool ID, what its Envoys refuse of the pool (empty: nothing)."""
        self._conflicts: dict[str, str] = {}
        """The sentence about a conflict, by claimant."""

    def told(self, views: Sequence[PoolsView], asked: int) -> None:
        """Takes in what those of `asked` gateways said that answered."""
        pools = [{pool.id: pool.refused or "" for pool in view.pools} for view in sorted(views, key=lambda it: it.gateway)]
        lost: dict[str, set[str]] = {}
        for it in (conflict for view in views for conflict in view.conflicts):
            lost.setdefault(it.claimant, set()).add(f"{it.name!r} is served by {it.holder}, which is older")
        conflicts = {claimant: f"{'; '.join(sorted(words))}: choose another name" for claimant, words in lost.items()}
        if (asked, pools, conflicts) == (self._asked, self._pools, self._conflicts):
            return
        everywhere = (asked, len(pools)) != (self._asked, len(self._pools))
        differing = {it for old, new in zip(self._pools, pools, strict=False) for it, _ in old.items() ^ new.items()}
        claimants = {it for it, _ in self._conflicts.items() ^ conflicts.items()}
        self._asked, self._pools, self._conflicts = asked, pools, conflicts
        self._changed(None if everywhere else {_key(it.rpartition("/")[0]) for it in differing} | {_key(it) for it in claimants})

    def of(self, key: Key, pools: Sequence[str]) -> Routing:
        """What they say of a model with these pools."""
        ids = [pool_id(key.namespace, key.name, pool) for pool in pools]
        refused = {known[it] for known in self._pools for it in ids if known.get(it)}
        return Routing(
            asked=self._asked,
            answered=len(self._pools),
            ignorant=sum(not known.keys() >= set(ids) for known in self._pools),
            refused="; ".join(sorted(refused)),
            conflict=self._conflicts.get(str(key), ""),
        )


def _key(name: str) -> Key:
    """`KIND NAMESPACE/NAME`, or `NAMESPACE/NAME` of an InferenceModel."""
    kind, _, place = name.rpartition(" ")
    namespace, _, model = place.partition("/")
    return Key(kind or "InferenceModel", namespace, model)
