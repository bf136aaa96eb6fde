"""The load of a replica's data-parallel ranks as that of one replica. Pure."""

from collections.abc import Sequence

import msgspec

from penstock.api.events import MEDIA
from penstock.api.load_report import LoadReport, WaitingReason

_SUMS = (
    *("num_requests_running", "max_num_seqs", "kv_blocks_total", "kv_blocks_reclaimable", "prefill_backlog_tokens"),
    *("prefill_tokens_per_s", "prompt_tokens_per_s", "generation_tokens_per_s", "lora_slots", "lora_slots_free"),
    *(f"{medium}_tier_tokens_per_s" for medium in MEDIA),
)


def merged(reports: Sequence[LoadReport]) -> LoadReport:
    """The load of all ranks as that of one replica. Its epoch is the first rank's, and its `seq` above every rank's own: so it
    replaces what the first rank's event stream says of that rank alone."""
    first = reports[0]
    if len(reports) == 1:
        return first
    total = sum(report.kv_blocks_total for report in reports)
    held = sum(report.kv_cache_usage_perc * report.kv_blocks_total for report in reports)
    adapters = [set(report.adapters) for report in reports if report.adapters is not None]
    waiting: dict[WaitingReason, int] = {}
    for report in reports:
        for reason, count in report.num_requests_waiting.items():
            waiting[reason] = waiting.get(reason, 0) + count
    return msgspec.structs.replace(
        first,
        seq=sum(report.seq for report in reports),
        num_requests_waiting=waiting,
        kv_cache_usage_perc=held / total if total else 0.0,
        decode_step_s=max(report.decode_step_s for report in reports),
        transfer_s=max(report.transfer_s for report in reports),
        transfer_s_per_token=max(report.transfer_s_per_token for report in reports),
        lora_running=_added([report.lora_running for report in reports]),
        lora_waiting=_added([report.lora_waiting for report in reports]),
        adapters=tuple(name for name in first.adapters or () if all(name in own for own in adapters)) if adapters else None,
        **{name: sum(getattr(report, name) for report in reports) for name in _SUMS},
    )


def _added(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: sum(own.get(name, 0) for own in counts) for name in dict.fromkeys(name for own in counts for name in own)}
