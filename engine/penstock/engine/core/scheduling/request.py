"""A request inside the core."""

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

import msgspec

from penstock.api.load_report import WaitingReason
from penstock.engine.core.scheduling.guides import Guide
from penstock.engine.messages import AddRequest, FinishReason
from penstock.engine.sampling import SamplingParams
from penstock.prompt.hashing import BlockHasher, ExtraKeys

if TYPE_CHECKING:
    from penstock.engine.core.scheduling.lora.adapter import Adapter


class RequestStatus(IntEnum):
    """State of a request. All states after PREEMPTED are final."""

    WAITING = 0
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 1
    WAITING_FOR_REMOTE_KVS = 2
    WAITING_FOR_STREAMING_REQ = 3
    RUNNING = 4
    PREEMPTED = 5
    FINISHED_STOPPED = 6
    FINISHED_LENGTH_CAPPED = 7
    FINISHED_ABORTED = 8
    FINISHED_IGNORED = 9
    FINISHED_ERROR = 10
    FINISHED_REPETITION = 11

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self > RequestStatus.PREEMPTED


PARKED_STATUS: dict[WaitingReason, RequestStatus] = {
    "grammar": RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
    "remote_kv": RequestStatus.WAITING_FOR_REMOTE_KVS,
    "streaming": RequestStatus.WAITING_FOR_STREAMING_REQ,
}
"""What a request can be parked for."""

FINISHED_STATUS = {
    FinishReason.STOP: RequestStatus.FINISHED_STOPPED,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH_CAPPED,
    FinishReason.ABORT: RequestStatus.FINISHED_ABORTED,
    FinishReason.IGNORED: RequestStatus.FINISHED_IGNORED,
    FinishReason.ERROR: RequestStatus.FINISHED_ERROR,
    FinishReason.REPETITION: RequestStatus.FINISHED_REPETITION,
}


class Request:
    """One sequence from arrival to end.

    While it has a row, the row table holds its tokens and progress; otherwise `token_ids` does, and nothing is computed.
    """

    __slots__ = (
        "_extra_keys",
        "adapter",
        "asked_elsewhere_at",
        "asked_tiers",
        "block_hashes",
        "deadline",
        "first_token_at",
        "guide",
        "images",
        "index",
        "key",
        "lends",
        "looked_up_at",
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "request_id",
        "row",
        "sampling",
        "sighted",
        "status",
        "tenant",
        "token_ids",
        "waited",
        "waiting_since",
        "waits_for",
    )

    def __init__(self, message: AddRequest, ordinal: int, adapter: "Adapter | None" = None, now: float = 0.0) -> None:
        self.index = message.index
        self.request_id = message.request_id
        self.token_ids = message.prompt_token_ids
        """Tokens known when it last had no row: the prompt, and what was generated before a preemption."""
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.sampling: SamplingParams = message.sampling
        self.priority = message.priority
        self.tenant = message.tenant
        self.adapter = adapter
        self.deadline = message.deadline
        self.lends = message.lends
        """Whether its prompt's pages are lent to another replica when it has ended."""
        self.images = message.images
        """Images in prompt order."""
        self.guide: Guide | None = None
        """What its next tokens may be; None: any."""
        self.key = (message.priority, message.arrival_time, ordinal)
        """The order in which requests are served: the smallest first, and the largest preempted first."""
        self.status = RequestStatus.WAITING
        self.waits_for: WaitingReason = "capacity"
        """Why it did not start when that was last tried, or what it is parked for; of no meaning while RUNNING."""
        self.waiting_since = now
        """When that became the reason, Unix time in seconds."""
        self.waited: dict[WaitingReason, float] = {}
        """Seconds by reason before it first ran, as far as they are over; of no meaning afterwards."""
        self.row = -1
        """Its row while RUNNING."""
        self.num_cached_tokens = -1
        """Prompt tokens that the prefix cache supplied when it first ran; -1 before."""
        self.num_preemptions = 0
        self.asked_elsewhere_at = -1
        """`num_preemptions` when KV was last looked for beyond the local cache."""
        self.asked_tiers: tuple[int, int] = (-1, 0)
        """`num_preemptions` at the time, and how many of the tiers behind the host's memory have been asked since."""
        self.looked_up_at = -1
        """`num_preemptions` when a shared store was last asked for its pages."""
        self.sighted = False
        """Whether the blocks of its prompt were counted (`Sightings`)."""
        self.first_token_at = 0.0
        """Unix time in seconds; 0 before."""
        self.block_hashes: list[bytes] = []
        """Hashes of its full blocks, as far as they were needed."""
        self._extra_keys = ExtraKeys(
            lora=adapter.info.name if adapter is not None else None,
            cache_salt=message.cache_salt,
            tenant=message.tenant,
            items=tuple(image.item for image in message.images),
        )

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first token; 0 before, and where a clock was set back meanwhile."""
        return max(self.first_token_at - self.key[1], 0.0)

    @property
    def extra_keys(self) -> ExtraKeys:
        """What forks the chain of its blocks besides their tokens."""
        return self._extra_keys

    @property
    def has_started(self) -> bool:
        """Whether it has ever had a row."""
        return self.num_cached_tokens >= 0

    def wait_for(self, reason: WaitingReason, now: float) -> None:
        """Set the reason that it waits for from `now` on."""
        # A clock that is set back must not turn an interval negative.
        self.waited[self.waits_for] = self.waited.get(self.waits_for, 0.0) + max(now - self.waiting_since, 0.0)
        self.waits_for, self.waiting_since = reason, now

    def extend_prompt(self, token_ids: Sequence[int]) -> None:
        """Append to a prompt whose beginning came with the request."""
        self.token_ids.extend(token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    def extend_hashes(self, hasher: BlockHasher, token_ids: Sequence[int]) -> None:
        """Hashes the full blocks of `token_ids`, all tokens from the first one, that are not hashed yet."""
        hasher.extend(self.block_hashes, token_ids, self._extra_keys)

    def rename_chain(self, lora: str) -> None:
        """Blocks that it fills from now on are found under this name of its adapter alone: another one has its old name."""
        self._extra_keys = msgspec.structs.replace(self._extra_keys, lora=lora)
        self.block_hashes.clear()


def order(request: Request) -> tuple[int, float, int]:
    """The sort key of requests."""
    return request.key
