"""The attention backend of a model's layers: chosen once, at start, with the reason for each backend that was refused."""

import importlib
import logging

from penstock.engine.attention.backends.interface import AttentionBackend, AttentionNeeds
from penstock.engine.config import AttentionBackendName, ConfigError

log = logging.getLogger(__name__)

BACKENDS: dict[AttentionBackendName, str] = {
    "triton": "penstock.engine.attention.backends.triton:TritonBackend",
    "flash_attn": "penstock.engine.attention.backends.flash_attn:FlashAttentionBackend",
    "flashinfer": "penstock.engine.attention.backends.flashinfer:FlashInferBackend",
    "torch": "penstock.engine.attention.backends.torch:TorchBackend",
}
"""Backends by name, in the order in which they are tried. Each is imported only then."""


def choose_backend(needs: AttentionNeeds, forced: AttentionBackendName | None = None) -> type[AttentionBackend]:
    """The first backend that can serve these layers, or the one that is asked for.

    Raises:
        ConfigError: The one that is asked for cannot, or none can; the message says why.
    """
    refused: list[str] = []
    for name, path in BACKENDS.items() if forced is None else [(forced, BACKENDS[forced])]:
        module, _, attribute = path.partition(":")
        backend: type[AttentionBackend] = getattr(importlib.import_module(module), attribute)
        reasons = backend.refusals(needs)
        if not reasons:
            log.info("attention: %s%s", name, f" ({'; '.join(refused)})" if refused else "")
            return backend
        refused.append(f"{name}: {', '.join(reasons)}")
    flag = "" if forced is None else f"--attention-backend {forced}: "
    raise ConfigError(f"{flag}no attention backend can serve this model here: {'; '.join(refused)}")
