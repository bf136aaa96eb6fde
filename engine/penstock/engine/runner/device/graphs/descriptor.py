"""What a graph was captured for."""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum, IntEnum

from penstock.engine.config import CudagraphMode


class GraphMode(Enum):
    """How a step runs."""

    NONE = "NONE"
    """Kernel by kernel."""
    PIECEWISE = "PIECEWISE"
    """What lies between two attentions is a graph; attention, and what follows the model, runs kernel by kernel."""
    FULL = "FULL"
    """One graph from the inputs to the sampled tokens."""


class GraphSupport(IntEnum):
    """Which batches an attention backend can be captured with; each holds those before it."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """One new token of each request."""
    UNIFORM_BATCH = 2
    """Equally many of each."""
    ALWAYS = 3


@dataclass(frozen=True)
class BatchDescriptor:
    """The key of a graph: everything that was decided on the host while it was captured, so that steps of one key launch the same
    kernels with the same arguments. Lengths, positions, blocks and parameters are not: the kernels read them on the device."""

    num_tokens: int
    """Padded."""
    num_reqs: int | None
    """Padded; None: any number (PIECEWISE, where no kernel within a graph knows of requests)."""
    uniform_query_len: int | None = None
    """New tokens of each request: 1, or 1 + K where K drafts are verified; None: they differ, or may."""
    has_lora: bool = False
    """Whether the kernels that add adapters are launched."""
    variant: Hashable = None
    """Whatever else the launches depend on: which stages of the sampler run, say."""
    shares: bool = False
    """Whether attention reads a prefix of all requests apart."""

    @property
    def uniform(self) -> bool:
        """Whether all requests have equally many new tokens."""
        return self.uniform_query_len is not None


def effective_mode(asked: CudagraphMode, support: GraphSupport, max_query_len: int = 1) -> tuple[CudagraphMode, str | None]:
    """The mode that a backend allows, and why it is another than was asked for (None: it is not).

    Args:
        asked: As configured.
        support: Of the attention backend; of several the least.
        max_query_len: New tokens of a request in uniform steps: 1 + K with K drafts.
    """
    if asked in ("NONE", "PIECEWISE"):
        return asked, None
    uniform = GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE if max_query_len == 1 else GraphSupport.UNIFORM_BATCH
    if support < uniform:
        return "PIECEWISE", f"attention cannot be captured with {max_query_len} tokens a request ({support.name})"
    if asked == "FULL" and support < GraphSupport.ALWAYS:
        return "FULL_AND_PIECEWISE", f"attention cannot be captured in mixed batches ({support.name})"
    return asked, None
