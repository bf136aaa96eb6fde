"""The attention backend of a model's layers: chosen once, at start, with the reason for each backend that was refused."""

import importlib
import logging
from typing import Literal

from penstock.engine.attention.backends.interface import AttentionBackend, AttentionNeeds
from penstock.engine.attention.backends.phases import AttentionPhases
from penstock.engine.config import AttentionBackendName, ConfigError

log = logging.getLogger(__name__)

BACKENDS: dict[AttentionBackendName, str] = {
    "triton": "penstock.engine.attention.backends.triton:TritonBackend",
    "flash_attn": "penstock.engine.attention.backends.flash_attn:FlashAttentionBackend",
    "flashinfer": "penstock.engine.attention.backends.flashinfer:FlashInferBackend",
    "torch": "penstock.engine.attention.backends.torch:TorchBackend",
}
"""Backends by name, in the order in which they are tried. Each is imported only then."""
_BY_NAME_ALONE: dict[AttentionBackendName, str] = {"gluon": "penstock.engine.attention.backends.gluon:GluonBackend"}
"""Backends that no model has unless it asks for them."""
Flag = Literal["--attention-backend", "--prefill-attention-backend"]
_FLAGS: dict[Flag, str] = {"--attention-backend": "attention", "--prefill-attention-backend": "attention of prompts"}
"""What each chooses, for the log."""


def choose_attention(
    needs: AttentionNeeds, asked: AttentionBackendName | None, prefill: AttentionBackendName | None, max_decode_tokens: int
) -> AttentionPhases:
    """The backends of a model's layers.

    Args:
        needs: What the layers ask.
        asked: The backend of decodes, and of prompts unless `prefill` says otherwise; None: the first that can serve them.
        prefill: The backend of steps with prompts.
        max_decode_tokens: See `AttentionPhases`.

    Raises:
        ConfigError: As of `choose_backend`.
    """
    decode = choose_backend(needs, asked)(needs)
    if prefill is None or prefill == decode.name:
        return AttentionPhases(decode, decode, max_decode_tokens)
    other = choose_backend(needs, prefill, "--prefill-attention-backend")(needs)
    return AttentionPhases(decode, other, max_decode_tokens)


def choose_backend(
    needs: AttentionNeeds, forced: AttentionBackendName | None = None, flag: Flag = "--attention-backend"
) -> type[AttentionBackend]:
    """The first backend that can serve these layers, or the one that `flag` asks for.

    Raises:
        ConfigError: The one that is asked for cannot, or none can; the message says why.
    """
    refused: list[str] = []
    for name, path in BACKENDS.items() if forced is None else [(forced, (BACKENDS | _BY_NAME_ALONE)[forced])]:
        module, _, attribute = path.partition(":")
        backend: type[AttentionBackend] = getattr(importlib.import_module(module), attribute)
        reasons = backend.refusals(needs)
        if not reasons:
            log.info("%s: %s%s", _FLAGS[flag], name, f" ({'; '.join(refused)})" if refused else "")
            return backend
        refused.append(f"{name}: {', '.join(reasons)}")
    asked = "" if forced is None else f"{flag} {forced}: "
    raise ConfigError(f"{asked}no attention backend can serve this model here: {'; '.join(refused)}")
