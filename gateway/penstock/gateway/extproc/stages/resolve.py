"""What a client's `model` means: a model, an adapter on it, or the canary that takes some of its traffic."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from penstock.api.fleet import InferencePool, Model
from penstock.gateway.extproc.call import Call, Refused
from penstock.gateway.extproc.passage import Passage
from penstock.gateway.load.prompts import PromptLibrary
from penstock.gateway.models import listing, served
from penstock.gateway.models.canary import conversation_key, side
from penstock.gateway.models.names import Named, unknown
from penstock.gateway.models.scopes import Scopes
from penstock.gateway.models.served import ServedNames
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.policies import POLICIES
from penstock.gateway.picker.state import FleetState
from penstock.gateway.picker.subset import Subset, only
from penstock.gateway.tenants.tenant import Tenant


class Meaning(NamedTuple):
    """What `Resolve` sets of a `Passage`."""

    adapter: str | None
    model: Model
    name: str
    renamed: str | None


class Resolve:
    """Resolves a name to a model of the fleet, and to those of its replicas that the request's port allows.

    A request comes by the gateway's own port, where every name of the fleet is known, or by the port of one InferencePool, where
    only the names that its pods serve are known.
    """

    def __init__(self, state: FleetState, names: ServedNames, prompts: PromptLibrary) -> None:
        self._state = state
        self._served = names
        self._prompts = prompts
        self._scopes = Scopes(state)
        self._named_by = state.directory.names
        self._meanings: dict[str, Meaning] = {}

    def run(self, passage: Passage) -> None:
        """Finds what the body names; raises `Refused` with 404 where there is no such thing here."""
        call, name, tenant = passage.call, passage.body.model, passage.tenant
        if not tenant.limits.may_use(name):  # as if it did not exist
            raise self.unknown(name, call, tenant)
        if call.inference_pool is None and call.subset is None and (found := self.meaning(name)) is not None:
            passage.adapter, passage.model, passage.name, passage.renamed = found
            passage.subset, passage.resolved = None, True
            return
        pool = self._pool(call)
        named = self._named(passage, pool)
        if named is None:
            assert pool is not None
            self._open(passage, pool)
        else:
            self._owned(passage, named, pool)
        passage.resolved = True
        if passage.model.policy not in POLICIES:
            message = f"model {passage.body.model!r} asks for an unknown routing policy, {passage.model.policy!r}"
            raise Refused(503, message, "unknown_policy")
        if named is not None and pool is None and call.subset is None and not self._shared(named):
            self._same_for_all()[name] = Meaning(passage.adapter, passage.model, passage.name, passage.renamed)

    async def anew(self, passage: Passage, refused: Refused) -> None:
        """As `run`, which has refused the name for the first time, but the pods of an open pool are asked before. Where there is
        nobody to ask raises `refused`."""
        pool = self._pool(passage.call)
        if refused.status != 404 or pool is None or not self._open_models(pool):
            raise refused
        await self._served.refresh(self._scopes.of(pool).members)
        self.run(passage)

    def meaning(self, name: str) -> Meaning | None:
        """What a name means in every request by the gateway's own port that no subset narrows. None: that depends on the request,
        or nobody has asked before."""
        return self._same_for_all().get(name)

    def _same_for_all(self) -> dict[str, Meaning]:
        """What names mean in every request by the gateway's own port that no subset narrows, as far as that was asked."""
        names = self._state.directory.names
        if names is not self._named_by:
            self._named_by, self._meanings = names, {}
        return self._meanings

    def _shared(self, named: Named) -> bool:
        """Whether canaries take some of the requests."""
        return named.adapter is None and bool(self._state.directory.names.canaries(named.model))

    def names(self, call: Call, tenant: Tenant) -> Iterator[tuple[str, dict[str, Any]]]:
        """All names that a request of this kind may use, as OpenAI's API describes them."""
        yield from ((name, entry) for name, entry in self._names(self._pool(call)) if tenant.limits.may_use(name))

    def _names(self, pool: InferencePool | None) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, named in self._state.directory.names.items():
            if pool is None or named.model.id in pool.models:
                replicas = self._state.directory.replicas_of(named.model)
                yield name, listing.entry(name, named, self._prompts.max_model_len(replicas))
        if pool is not None and self._open_models(pool):
            for name, described in self._served.names(self._keys(pool)).items():
                yield name, served.entry(described)

    def unknown(self, name: str, call: Call, tenant: Tenant) -> Refused:
        """The refusal of a name that is not known here."""
        pool = self._pool(call)
        there = [other for other, named in self._state.directory.names.items() if pool is None or named.model.id in pool.models]
        if pool is not None and self._open_models(pool):
            there.extend(self._served.names(self._keys(pool)))
        message = unknown(name, [other for other in there if tenant.limits.may_use(other)])
        return Refused(404, message, "model_not_found", param="model")

    # --- names of the fleet ---

    def _named(self, passage: Passage, pool: InferencePool | None) -> Named | None:
        """What the body names; None where only an open pool can know it."""
        name = passage.body.model
        named = self._state.directory.names.get(name)
        if named is not None and (pool is None or named.model.id in pool.models):
            return named
        if pool is None or not self._open_models(pool):
            raise self.unknown(name, passage.call, passage.tenant)
        return None

    def _owned(self, passage: Passage, named: Named, pool: InferencePool | None) -> None:
        passage.adapter = named.adapter.served_names[0] if named.adapter is not None else None
        passage.model = named.model if named.adapter is not None else self._side(passage, named.model, pool)
        passage.subset = self._narrowed(passage.call, passage.model, pool)
        passage.name = passage.adapter or passage.model.name
        # Engines of a model know all its names; those of a canary not the model's, and adapters by one name alone.
        known = named.adapter is None and passage.model is named.model
        passage.renamed = None if known or passage.name == passage.body.model else passage.name

    def _side(self, passage: Passage, main: Model, pool: InferencePool | None) -> Model:
        """The model itself or one of its canaries."""
        canaries = [
            it for it in self._state.directory.names.canaries(main) if it.served_names and (pool is None or it.id in pool.models)
        ]
        if not canaries:
            return main
        key = conversation_key(passage.body.fields, passage.tenant.name, passage.request_id)
        return side(main, canaries, key, lambda model: self._serves(passage.call, model, pool))

    def _serves(self, call: Call, model: Model, pool: InferencePool | None) -> bool:
        subset = self._narrowed(call, model, pool)
        return any(
            replica.ready and not replica.terminating and not replica.cordoned and (subset is None or subset.allows(replica))
            for replica in self._state.directory.replicas_of(model)
        )

    # --- pools ---

    def _pool(self, call: Call) -> InferencePool | None:
        """The pool by whose port the request came; None for the gateway's own."""
        if call.inference_pool is None:
            return None
        pool = self._state.directory.inference_pool(call.inference_pool)
        if pool is None:
            raise Refused(503, f"there is no InferencePool {call.inference_pool}", "no_inference_pool")
        return pool

    def _open_models(self, pool: InferencePool) -> list[Model]:
        return self._scopes.of(pool).open_models

    def _open(self, passage: Passage, pool: InferencePool) -> None:
        """A name that pods of an open pool serve. While none of them has said what it serves, all of them might."""
        name, keys = passage.body.model, self._keys(pool)
        (passage.model,) = self._open_models(pool)
        passage.name, passage.renamed, passage.adapter = name, None, None
        passage.subset = self._narrowed(passage.call, passage.model, pool)
        if not self._served.known(keys):
            return
        described = self._served.get(name, keys)
        if described is None:
            raise self.unknown(name, passage.call, passage.tenant)
        passage.adapter = name if described.parent is not None else None
        serving = self._served.serving(name, keys)
        if len(serving) < len(keys):
            passage.subset = only((self._state.directory.replicas[key] for key in serving), passage.call.subset)

    def _keys(self, pool: InferencePool) -> list[ReplicaKey]:
        return self._scopes.of(pool).keys

    def _narrowed(self, call: Call, model: Model, pool: InferencePool | None) -> Subset | None:
        """The replicas of `model` that the request may go to; None: all of them."""
        inside = self._scopes.of(pool).narrowed[model.id] if pool is not None else None
        if inside is None or call.subset is None:
            return inside if call.subset is None else call.subset
        return only((replica for replica in self._state.directory.replicas_of(model) if inside.allows(replica)), call.subset)
