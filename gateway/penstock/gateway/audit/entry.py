"""One line of the audit log. The format is documented in docs/gateway/audit.md; whatever is not listed here is never written."""

from datetime import UTC, datetime

import msgspec

from penstock.gateway.extproc.call import Call
from penstock.gateway.extproc.stages.listing import MODELS_PATH
from penstock.prompt.processor import PROMPT_PATHS

MAX_ID = 128
"""Letters of a request id, which under other gateways than our own Envoy the client chooses."""


class Entry(msgspec.Struct, kw_only=True):
    """One request: names and figures of our own, none of the client's words. Every field is in every line; null: not known, or
    there is none."""

    time: str
    """When the request was complete at the gateway: RFC 3339, UTC."""
    gateway: str
    """The process that decided."""
    request_id: str | None
    path: str | None
    """One of those that exist; null for any other."""
    tenant: str | None = None
    """Name of the tenant in the tenants file."""
    model: str | None = None
    """`namespace/name` of the model or of its canary."""
    adapter: str | None = None
    status: int | None = None
    """HTTP status that the client got, or that Envoy gave up with."""
    reason: str | None = None
    """Why the gateway refused it."""
    policy: str | None = None
    score: float | None = None
    """Score of the picked replica under that policy. The least wins. Seconds for `Cost`."""
    next_best: str | None = None
    """The replica that came second."""
    next_score: float | None = None
    replica: str | None = None
    replica_uid: str | None = None
    prefill_replica_uid: str | None = None
    """UID of the replica that computed the prompt, if it was another one."""
    waited_ms: float | None = None
    """Milliseconds from the complete request to the pick."""
    ttft_ms: float | None = None
    """Milliseconds from the complete request to the first token."""
    duration_ms: float | None = None
    """Milliseconds from the complete request to the end of the answer."""
    prompt_tokens: int | None = None
    """Prompt tokens as the engine counted them, or as the gateway did if the engine does not report them."""
    predicted_cached_tokens: int | None = None
    cached_tokens: int | None = None
    """That the engine's cache did supply."""
    output_tokens: int | None = None
    finish_reason: str | None = None
    """The engine's; of several answers, that of the last."""
    bytes_received: int | None = None
    bytes_sent: int | None = None
    """Bytes of the answer's body, as Envoy counted them."""
    ended_by: str | None = None
    """What told the gateway of the end: as in `penstock_picker_booking_released_total`."""


def entry_of(call: Call, gateway: str, unix_s: float) -> Entry:
    """What is known of a request by its head, and how long its body was."""
    return Entry(
        time=datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds"),
        gateway=gateway,
        request_id=call.headers.get("x-request-id", "")[:MAX_ID] or None,
        path=_known(call.path),
        bytes_received=len(call.body) or None,
    )


def _known(path: str) -> str | None:
    if path in PROMPT_PATHS:
        return path
    return MODELS_PATH if path == MODELS_PATH or path.startswith(f"{MODELS_PATH}/") else None
