"""The engine. `LLM` runs a model in a script, `AsyncLLM` in an asyncio program; `penstock serve` puts HTTP before the same.

What is named here is loaded when it is first used: `penstock --help` imports this package too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.engine.args import EngineArgs
    from penstock.engine.config import ConfigError
    from penstock.engine.core.ipc.client import CoreError
    from penstock.engine.frontend.async_llm import AsyncLLM
    from penstock.engine.frontend.python.embedding_output import EmbeddingOutput, EmbeddingRequestOutput
    from penstock.engine.frontend.python.offline import LLM
    from penstock.engine.frontend.python.params import SamplingParams
    from penstock.engine.frontend.python.request_output import CompletionOutput, Logprob, RequestFailed, RequestOutput

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "ConfigError",
    "CoreError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "Logprob",
    "RequestFailed",
    "RequestOutput",
    "SamplingParams",
]

_MODULES = {
    "LLM": "frontend.python.offline",
    "AsyncLLM": "frontend.async_llm",
    "CompletionOutput": "frontend.python.request_output",
    "ConfigError": "config",
    "CoreError": "core.ipc.client",
    "EmbeddingOutput": "frontend.python.embedding_output",
    "EmbeddingRequestOutput": "frontend.python.embedding_output",
    "EngineArgs": "args",
    "Logprob": "frontend.python.request_output",
    "RequestFailed": "frontend.python.request_output",
    "RequestOutput": "frontend.python.request_output",
    "SamplingParams": "frontend.python.params",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
