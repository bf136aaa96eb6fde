"""The arguments of the engine's container. A field that becomes one flag names it in `penstock.api.resources` (`Flag`)."""

import math

from penstock.api.resources import InferenceModel, seconds
from penstock.api.resources.base import flags
from penstock.api.resources.model import Lora
from penstock.api.resources.pools import Parallelism
from penstock.operator.desired.source import Fetched, source_args

HTTP, ADMIN, EVENTS, REPLAY = 8000, 8003, 5557, 5558
"""Ports of a replica."""


def engine_args(model: InferenceModel, fetched: Fetched | None = None, parallelism: Parallelism | None = None) -> list[str]:
    """The arguments of `penstock serve`.

    Args:
        fetched: What the model's Job brought, where it needs one.
        parallelism: Of the pool; None: a replica is one process.
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
        *(() if parallelism is None else flags(parallelism)),
        *_lora(model.spec.lora),
        *model.spec.engine.extra_args,
    ]


def _lora(lora: Lora | None) -> list[str]:
    """Room for adapters, which the operator then loads over HTTP; the gateway forwards no such request."""
    if lora is None:
        return []
    return ["--enable-lora", *flags(lora), "--allow-runtime-lora-updating"]
