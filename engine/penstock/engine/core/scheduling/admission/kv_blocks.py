"""The whole known sequence must fit into free blocks, with the watermark left over."""

from penstock.api.load_report import WaitingReason
from penstock.engine.cache.kv_manager import KVCacheManager
from penstock.engine.core.scheduling.admission.rule import Candidate


class KVBlocks:
    """Refuses a request whose tokens would not all fit, although its first chunk would: it would soon preempt or be preempted."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv

    def refuses(self, candidate: Candidate) -> WaitingReason | None:
        """Why the candidate must wait."""
        fits = self._kv.can_admit(
            candidate.num_tokens, candidate.hit, reserved=candidate.reserved_blocks, alone=candidate.num_running == 0
        )
        return None if fits else "capacity"
