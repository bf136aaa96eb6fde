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
    """Origins of web pages that may call the API, but not an administrative port; `*`: all."""
    tls: TlsFiles | None = None
    """None: plain HTTP."""
    otlp_traces_endpoint: str | None = None
    """URL to which requests' spans are sent; None: no tracing."""
    runtime_lora_updating: bool = False
    """Whether adapters can be loaded and unloaded over HTTP."""
