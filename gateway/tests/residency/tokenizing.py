"""The prompt library as the stage of the director asks it."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from penstock.api.fleet import Replica
from penstock.gateway.load.prompts import PromptLibrary
from penstock.gateway.load.tokenized import TokenizedPrompts
from penstock.prompt.processor import COMPLETIONS_PATH


async def tokenized(
    library: PromptLibrary,
    replicas: Sequence[Replica],
    body: Mapping[str, Any],
    *,
    path: str = COMPLETIONS_PATH,
    raw: bytes | None = None,
    tenant: str = "",
    adapter: str | None = None,
) -> TokenizedPrompts:
    """The prompts of a body, at once or by a thread; `raw`: its bytes, where they are not what it would be written as."""
    asked = replicas, path, orjson.dumps(body) if raw is None else raw, body, tenant, adapter
    return library.at_once(*asked) or await library.in_thread(*asked)
