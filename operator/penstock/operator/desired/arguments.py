"""The arguments of the engine's container. A field that becomes one flag names it in `penstock.api.resources` (`Flag`)."""

import json
import math
from typing import Final

from penstock.api import labels
from penstock.api.resources import InferenceModel, seconds
from penstock.api.resources.base import flags
from penstock.api.resources.model import Lora
from penstock.api.resources.pools import Pool
from penstock.operator.desired.source import Fetched, source_args

HTTP, ADMIN, EVENTS, REPLAY = 8000, 8003, 5557, 5558
"""Ports of a replica."""
A_RANK: Final = 2
"""Each data-parallel rank has the ports of its event stream so far behind those of the rank before."""
KV_ROLES: Final = {"Prefill": "kv_producer", "Decode": "kv_consumer"}
"""By a pool's role, vLLM's name for what its replicas do with KV pages."""
KV_DISK: Final = "/var/cache/penstock/kv"
"""Where a replica finds the disk for its KV pages."""
KV_SECRET, KV_SECRET_KEY = "/etc/penstock/kv-transfer", "secret"
"""Where a replica finds the secret that both roles know, and its key."""


def engine_args(model: InferenceModel, fetched: Fetched | None = None, pool: Pool | None = None) -> list[str]:
    """The arguments of `penstock serve`.

    Args:
        fetched: What the model's Job brought, where it needs one.
        pool: The replica's; None: a replica is one process that does all of a request.
    """
    return [
        *source_args(model, fetched),
        "--served-model-name",  # takes all words up to the next flag
        *model.served_names,
        "--host=$(POD_IP)",
        f"--port={HTTP}",
        f"--admin-port={ADMIN}",
        f"--events-port={EVENTS}",
        f"--replay-port={REPLAY}",
        f"--shutdown-timeout={math.ceil(seconds(model.spec.drain_timeout))}",
        *flags(model.spec.source),
        *flags(model.spec.engine),
        *(() if model.spec.engine.connector.disk is None else [f"--kv-offload-directory={KV_DISK}"]),
        *(() if pool is None else [*flags(pool.parallelism), *_nodes(pool), *_experts(pool), *_transfer(pool)]),
        *_lora(model.spec.lora),
        *model.spec.engine.extra_args,
    ]


def event_ports(pool: Pool) -> list[tuple[str, int]]:
    """The ports of the event streams and their replays, named by data-parallel rank; the first one's have the plain names."""
    ranks = range(pool.parallelism.data)
    told = ((labels.EVENTS_PORT, EVENTS), (labels.REPLAY_PORT, REPLAY))
    return [(labels.rank_port(name, rank), port + A_RANK * rank) for rank in ranks for name, port in told]


def _nodes(pool: Pool) -> list[str]:
    """Return the flag that says what a pod of a group has; LeaderWorkerSet's environment says which pod it is."""
    ranks = pool.parallelism
    if ranks.nodes == 1:
        return []
    return [f"--data-parallel-size-local={ranks.cores_a_node}" if ranks.data > 1 else f"--nnodes={ranks.nodes}"]


def _experts(pool: Pool) -> list[str]:
    expert = pool.parallelism.expert
    if not expert.enabled:
        return []
    if (when := expert.balancing) is None:
        return ["--enable-expert-parallel"]
    steps = {"window_size": when.window_size, "step_interval": when.step_interval}
    config = json.dumps({**steps, "num_redundant_experts": expert.redundant})
    return ["--enable-expert-parallel", "--enable-eplb", f"--eplb-config={config}"]


def _transfer(pool: Pool) -> list[str]:
    """Return the flags by which replicas of one role lend KV pages to those of the other."""
    if pool.role == "Both":
        return []
    config = {"kv_connector": "transfer", "kv_role": KV_ROLES[pool.role], "kv_ip": "$(POD_IP)"}
    return [f"--kv-transfer-config={json.dumps(config)}", f"--kv-transfer-secret-file={KV_SECRET}/{KV_SECRET_KEY}"]


def _lora(lora: Lora | None) -> list[str]:
    """Return the flags for adapters. The operator loads them over HTTP; the gateway forwards no such request."""
    if lora is None:
        return []
    return ["--enable-lora", *flags(lora), "--allow-runtime-lora-updating"]
