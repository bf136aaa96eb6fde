"""What a core counts, as it tells the frontend (msgpack). Counts are since the start."""

from collections.abc import Sequence

import msgspec

from penstock.api.load_report import LoadReport, WaitingReason
from penstock.engine.core.plan import GraphReport
from penstock.engine.cost import StepCost
from penstock.engine.roofline import Ceilings


class TierStats(msgspec.Struct, frozen=True, array_like=True):
    """KV pages in the host's memory, on the disk or in a store; counts are since the start."""

    pages: int
    """That fit."""
    pages_used: int
    stored_bytes: int
    loaded_bytes: int
    store_s: float
    load_s: float
    evicted_pages: int
    failed_pages: int
    """Pages of failed loads, whose tokens were computed."""
    declined_tokens: int = 0
    """Tokens that were computed because a load would have taken longer."""
    failed_stores: int = 0
    """Pages that could not be stored."""
    failed_lookups: int = 0
    """Questions for pages that found no answer in time."""


class TransferStats(msgspec.Struct, frozen=True, array_like=True):
    """KV pages between replicas; counts are since the start."""

    leases: int
    """Held now."""
    leased_pages: int
    """Held now."""
    expired_leases: int
    pulls: int
    pulled_bytes: int
    """Of one rank."""
    pull_s: float
    failed_pages: int
    """Pages that did not come, whose tokens were computed."""


class OffloadStats(msgspec.Struct, frozen=True, array_like=True):
    """KV pages beyond the KV cache."""

    memory: TierStats
    lower: dict[str, TierStats]
    """By name, what lies behind the host's memory: `disk`, `store`, `object`."""
    queried_tokens: int
    """Looked for, beyond what the KV cache held."""
    loaded_tokens: int
    """Tokens of those that were loaded."""
    transfer: TransferStats | None = None
    """None: this replica neither lends nor reads pages."""


class EncoderStats(msgspec.Struct, frozen=True, array_like=True):
    """What became of images; counts are since the start."""

    encoded: int
    """Images that a tower has run for."""
    cached: int
    """Images of requests whose embeddings were there."""
    tokens: int
    """Embeddings that were made."""
    seconds: float
    """Spent on that."""
    size: int
    """Embeddings that are kept at most."""
    used: int
    """Embeddings of those that are in the cache."""
    held: int
    """Embeddings of those that running requests need."""
    waiting: int
    """Images of requests that no tower has begun with, and whose embeddings are not there."""


class ExpertStats(msgspec.Struct, frozen=True, array_like=True):
    """What experts have had to do, over all ranks that divide them; counts are since the start."""

    served: list[int]
    """By rank: how often one of its experts was chosen for a token."""
    balancedness: float
    """Mean of the ranks' work over that of the busiest one, in the newest steps; 0 without work."""
    rebalances: int
    moved_bytes: int
    """Bytes of weights that ranks have taken from other ranks."""

    @classmethod
    def of_stages(cls, told: Sequence["ExpertStats | None"]) -> "ExpertStats | None":
        """Of all pipeline stages, where the least even one counts; None: experts stay where they are."""
        found = [it for it in told if it is not None and it.served]  # the others have layers without experts
        if not found:
            return next(iter(told), None)
        served = [sum(of_rank) for of_rank in zip(*(it.served for it in found), strict=True)]
        rebalances, moved = max(it.rebalances for it in found), sum(it.moved_bytes for it in found)
        return cls(served, min(it.balancedness for it in found), rebalances, moved)


class Buckets(msgspec.Struct, frozen=True, array_like=True):
    """A histogram; its bounds are those of `core.measure.step_meter`."""

    counts: list[int]
    """One a bucket; the last has no upper bound."""
    total: float
    """Sum of the values."""


class Roofline(msgspec.Struct, frozen=True, array_like=True):
    """What the core's steps would have taken at best."""

    ceilings: Ceilings
    floor_s: float
    """Seconds of all steps together, each at the ceiling that it meets."""


class GraphSteps(msgspec.Struct, frozen=True, array_like=True):
    """Steps that were launched in one way; see `GraphStep`."""

    mode: str
    reason: str
    steps: int
    tokens: int
    padding: int
    """Padding tokens that were computed."""


class DraftStats(msgspec.Struct, frozen=True, array_like=True):
    """What came of drafts since the start."""

    rows: int
    """Rows with drafts that steps have verified, a row once in each step."""
    drafted: list[int]
    """Verified drafts, by position in a row's drafts."""
    accepted: list[int]
    """Accepted drafts, by position."""


class GrammarStats(msgspec.Struct, frozen=True, array_like=True):
    """What came of grammars since the start."""

    compiled: int
    failed: int
    """Could not be compiled."""
    cached: int
    """Requests whose grammar was compiled already."""
    compile_s: float
    """Seconds that the compiled ones took."""


class StepStats(msgspec.Struct, frozen=True, array_like=True):
    """What the core's steps have been since its start."""

    seconds: Buckets
    tokens: Buckets
    """Tokens that a step computed."""
    sampled_tokens: int
    """Rows that passed the LM head for a next token, whether or not it could be used."""
    not_finite: int
    """Requests that failed because their logits were not finite."""
    cost: StepCost | None
    """Estimated; None: the model's shape is not known."""
    roofline: Roofline | None = None
    """None: the device's ceilings are not known."""
    graphs: list[GraphSteps] = []
    """Steps by CUDA graph, for a device that has them."""
    drafts: DraftStats | None = None
    """None: the engine makes no drafts."""


class CoreStats(msgspec.Struct, frozen=True, tag="stats"):
    """Sent on change, at most every 50 ms, and once a second while idle: the proof that the step loop turns."""

    report: LoadReport
    steps: int
    """Steps since the start."""
    preemptions: int
    prefix_queries: int
    """Prompt tokens looked up in the prefix cache since the start."""
    prefix_hits: int
    """Prompt tokens found there since the start."""
    preempted_tokens: int = 0
    """Tokens whose KV preempted requests gave up, since the start."""
    resumed_cached_tokens: int = 0
    """Tokens that the prefix cache supplied to those requests when they ran again."""
    step: StepStats | None = None
    paused: bool = False
    """Requests wait for a resume."""
    asleep: str | None = None
    """Why no request is taken, and what ends that; None: awake."""
    lora_loads: int = 0
    """Adapters that took a slot where they were not, since the start."""
    lora_reads: int = 0
    """Adapters that were read, since the start."""
    graphs: GraphReport | None = None
    """None: the device has no CUDA graphs."""
    command: str | None = None
    """What the core does next, saying nothing until it is done; None: steps."""
    grammars: GrammarStats | None = None
    encoder: EncoderStats | None = None
    """None: the model reads text alone."""
    offload: OffloadStats | None = None
    """None: no pages are kept in the host's memory."""
    """None: no request has had one."""
    waits: dict[WaitingReason, Buckets] = {}
    """Seconds that requests waited before they first ran, by reason; the bounds are those of `core.scheduling.waits`."""
    experts: ExpertStats | None = None
    """Of the first core; None: experts stay where they are."""
