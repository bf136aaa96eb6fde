"""How the API is served: flags of `penstock serve` that no engine needs."""

import msgspec

from penstock.engine.frontend.openai.parsing.registry import ParserConfig


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Parsers, and who may ask."""

    parsers: ParserConfig = ParserConfig()
    api_keys: tuple[str, ...] = ()
    """One of these in `authorization: Bearer …`; none: everybody may."""
