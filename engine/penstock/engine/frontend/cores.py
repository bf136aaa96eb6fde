"""The cores of a replica: one, or one for each data-parallel rank."""

from collections.abc import Callable, Sequence

from penstock.engine.config import EngineConfig
from penstock.engine.core.ipc.client import CoreClient
from penstock.engine.core.ipc.coupling import Coupling
from penstock.engine.core.ipc.far_cores import FarCores
from penstock.engine.kv_events_config import KVEventsConfig

Addresses = Callable[[int], Sequence[str]]
"""By rank, where its core publishes: the first address that is free."""


def _nowhere(_rank: int) -> Sequence[str]:
    return ()


def core_clients(
    config: EngineConfig,
    events: Addresses = _nowhere,
    replay: Addresses = _nowhere,
    *,
    kv_events: KVEventsConfig | None = None,
    shared: bool = False,
) -> list[CoreClient]:
    """The clients of all ranks' cores, to be started.

    Args:
        config: The replica's.
        events: Where the event streams are published.
        replay: Where their replays are.
        kv_events: Where they are published in vLLM's form.
        shared: Whether several frontends will join each of them.
    """
    coupling = Coupling(config.parallel) if config.parallel.expert_ranks > 1 else None
    far = FarCores(config, coupling) if config.parallel.cores_span_nodes else None
    return [
        CoreClient(
            config.of_rank(rank),
            events_addresses=events(rank),
            replay_addresses=replay(rank),
            kv_events=kv_events,
            engine_index=rank,
            shared=shared,
            coupling=coupling,
            far=far,
        )
        for rank in range(config.parallel.data_parallel_size)
    ]
