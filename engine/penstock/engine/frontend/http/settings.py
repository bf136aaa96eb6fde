"""How the API is served: flags of `penstock serve` that no engine needs."""

import msgspec

from penstock.engine.frontend.http.tls import TlsFiles
from penstock.engine.frontend.openai.parsing.registry import ParserConfig


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Parsers, who may ask for what, and how safely."""

    parsers: ParserConfig = ParserConfig()
    api_keys: tuple[str, ...] = ()
    """One of these in `authorization: Bearer …`; none: everybody may."""
    allowed_origins: tuple[str, ...] = ()
    """Of web pages that may ask, but not on a port for administration; `*`: of all."""
    tls: TlsFiles | None = None
    """None: plain HTTP."""
    otlp_traces_endpoint: str | None = None
    """Where requests' spans go, an URL; None: there are none."""
    runtime_lora_updating: bool = False
    """Whether adapters can be loaded and unloaded over HTTP."""
