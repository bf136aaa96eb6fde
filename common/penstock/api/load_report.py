"""The load report of a replica and its ORCA codec: one codec for the response header, `/load` and the event stream.

ORCA is `xds.data.orca.v3.OrcaLoadReport`. Penstock's own figures travel under `named_metrics`; `application_utilization` is set
too, so that Envoy's client-side weighted round robin works without a picker. Decoding is tolerant of the field's dialects
(three format words or none, `=` or `:`), since reports of other engines arrive in the same header.
"""

import base64
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Literal, get_args
from urllib.parse import quote, unquote

import msgspec

Format = Literal["TEXT", "JSON", "BIN"]
WaitingReason = Literal["capacity", "lora", "grammar", "remote_kv", "streaming", "paused"]
"""Why a request waits: for room, a LoRA slot, a compiled grammar, KV from elsewhere, the rest of its prompt, or the end of a
pause."""
WAITING_REASONS: tuple[WaitingReason, ...] = get_args(WaitingReason)

MAX_REPORT_BYTES = 16_384
_WAITING = "num_requests_waiting_by_reason."
_LORA_RUNNING = "lora_running."
_LORA_WAITING = "lora_waiting."
_NAMED = "named_metrics."


class LoadReportError(ValueError):
    """A load report that cannot be read; the message says what is wrong with it."""


class LoadReport(msgspec.Struct, frozen=True, tag="LoadReport"):
    """One replica's load at one moment.

    A report replaces every older one of the same `epoch` (smaller `seq`); a new `epoch` says that the engine has restarted.
    """

    epoch: int
    """Start of the engine, milliseconds since the Unix epoch."""
    seq: int
    """Rises with every report of an epoch."""
    num_requests_running: int = 0
    num_requests_waiting: dict[WaitingReason, int] = {}
    """Waiting requests by what they wait for; reasons with none are left out."""
    max_num_seqs: int = 0
    kv_cache_usage_perc: float = 0.0
    """Share of the KV blocks that running requests hold, 0 to 1; cached but free blocks count as free."""
    kv_blocks_total: int = 0
    """Blocks of a sequence's tokens that fit, whatever a block is made of."""
    kv_blocks_reclaimable: int = 0
    """Free ones, those that hold evictable cached prefixes included."""
    prefill_backlog_tokens: int = 0
    """Prompt tokens accepted and not yet computed, of waiting and running requests."""
    prefill_tokens_per_s: float = 0.0
    """Measured prefill speed (moving average over steps that prefilled); 0 until one was seen."""
    decode_step_s: float = 0.0
    """Measured time of a step at the present batch (moving average), seconds; 0 until one was seen."""
    prompt_tokens_per_s: float = 0.0
    """Prompt tokens computed, averaged over the last seconds: the demand on a prefill pool."""
    generation_tokens_per_s: float = 0.0
    """Tokens sampled, averaged over the last seconds: the demand on a decode pool."""
    memory_tier_tokens_per_s: float = 0.0
    """How fast tokens' KV comes from host memory into the KV cache, measured over the latest loads; 0: not known."""
    disk_tier_tokens_per_s: float = 0.0
    """The same from the disk."""
    store_tier_tokens_per_s: float = 0.0
    """The same from a store that replicas share."""
    object_tier_tokens_per_s: float = 0.0
    """The same from the object store."""
    transfer_s: float = 0.0
    """Seconds that it takes to fetch a prompt's KV from another replica into the KV cache, whatever its length, measured over the
    latest fetches."""
    transfer_s_per_token: float = 0.0
    """What each token adds. Both are 0 where nothing was fetched lately."""
    lora_slots: int = 0
    """Adapters that fit on the device at once; 0: the engine serves none."""
    lora_slots_free: int = 0
    """Slots that no adapter holds."""
    lora_running: dict[str, int] = {}
    """The adapters that hold a slot, each with its running requests; with 0 its slot may be given away."""
    lora_waiting: dict[str, int] = {}
    """Waiting requests by adapter, whatever they wait for; adapters with none are left out."""
    adapters: tuple[str, ...] | None = None
    """Names of the adapters that requests can ask for. None: not said, as by engines of others and by older ones of ours, and on
    response headers, which stay short: there it takes back nothing of what `/load` and the event stream have said."""

    @property
    def waiting(self) -> int:
        """All waiting requests, whatever they wait for."""
        return sum(self.num_requests_waiting.values())

    @property
    def application_utilization(self) -> float:
        """The tighter of batch width and KV memory, plus what waits; may exceed 1 (ORCA allows it)."""
        width = max(self.max_num_seqs, 1)
        return max(self.num_requests_running / width, self.kv_cache_usage_perc) + self.waiting / width

    def metrics(self) -> dict[str, float]:
        """The figures under `named_metrics`, waiting requests both as a total and by reason."""
        out: dict[str, float] = {}
        for name, _ in FIGURES:
            out[name] = getattr(self, name)
        out[WAITING] = self.waiting
        for reason, count in self.num_requests_waiting.items():
            out[_WAITING + reason] = count
        for prefix, adapters in ((_LORA_RUNNING, self.lora_running), (_LORA_WAITING, self.lora_waiting)):
            out.update({prefix + quote(name, safe="/:"): count for name, count in adapters.items()})
        return out

    @staticmethod
    def from_metrics(metrics: Mapping[str, float]) -> "LoadReport":
        """A report of ours from decoded `named_metrics`; raises `LoadReportError` where `epoch` or `seq` is missing."""
        if "epoch" not in metrics or "seq" not in metrics:
            raise LoadReportError("no epoch or seq: not a report of a Penstock engine")
        try:
            return msgspec.convert(_fields(metrics), LoadReport, strict=False)
        except msgspec.ValidationError as error:
            raise LoadReportError(f"not a report of a Penstock engine: {error}") from None


def _fields(metrics: Mapping[str, float]) -> dict[str, object]:
    """The fields of a report: scalars by their names, and what is spelled out by reason or by adapter."""
    fields: dict[str, object] = {}
    waiting: dict[str, float] = {}
    lora: dict[str, dict[str, float]] = {"lora_running": {}, "lora_waiting": {}}
    for name, figure in metrics.items():
        if name in _SCALAR:
            fields[name] = figure
        elif "." in name:
            kind, _, which = name.partition(".")
            if kind in lora:
                lora[kind][unquote(which)] = figure
            elif name in _BY_REASON and figure:
                waiting[which] = int(figure)
    return {**fields, **lora, "num_requests_waiting": waiting}


FIGURES: tuple[tuple[str, type], ...] = tuple(
    (field.name, field.type) for field in msgspec.structs.fields(LoadReport) if field.type in (int, float)
)
"""The scalar fields in wire order, with their types; what is counted by reason or by adapter is spelled out."""
WAITING = "num_requests_waiting"
_SCALAR = frozenset(name for name, _ in FIGURES)
_BY_REASON = frozenset(_WAITING + reason for reason in WAITING_REASONS)


# Fifteen digits are a double's, as all figures of ORCA are: what has more is read, or refused, the long way.
_WHOLE, _FIGURE = "([0-9]{1,15})", r"([0-9]{1,17}(?:\.[0-9]{1,20})?(?:e-[0-9]{1,3})?)"
_ITEM = f", {re.escape(_NAMED)}"
_OWN_REASON = re.compile(f"{_ITEM}{re.escape(_WAITING)}({'|'.join(WAITING_REASONS)})=([1-9][0-9]{{0,14}})")
_OWN = re.compile(
    f"TEXT application_utilization={_FIGURE.replace('(', '(?:', 1)}"
    + "".join(f"{_ITEM}{name}={_WHOLE if kind is int else _FIGURE}" for name, kind in FIGURES)
    + f"{_ITEM}{WAITING}=[0-9]{{1,15}}((?:{_OWN_REASON.pattern.replace('(', '(?:')})*)"
)


def encode(report: LoadReport, form: Format) -> str:
    """The value of the `endpoint-load-metrics` header, format word included."""
    metrics = report.metrics()
    if form == "TEXT":
        parts = [f"application_utilization={report.application_utilization:.6g}"]
        parts += [f"{_NAMED}{name}={value:.17g}" for name, value in metrics.items()]
        return "TEXT " + ", ".join(parts)
    if form == "JSON":
        body = {"application_utilization": report.application_utilization, "named_metrics": metrics}
        return "JSON " + json.dumps(body, separators=(",", ":"))
    return "BIN " + base64.b64encode(_to_proto(report.application_utilization, metrics)).decode()


def decode(value: str) -> LoadReport:
    """The Penstock report in a header value; raises `LoadReportError` for anything else, other engines' reports included."""
    return _own(value) or LoadReport.from_metrics(decode_metrics(value))


def _own(value: str) -> LoadReport | None:
    """The report of an engine of ours as `encode` writes it in TEXT, which every answer carries: one match in place of twenty
    splits. None for any other text, right or wrong."""
    found = _OWN.fullmatch(value)
    if found is None:
        return None
    *figures, reasons = found.groups()
    fields = {name: kind(figure) for (name, kind), figure in zip(FIGURES, figures, strict=True)}
    waiting = {reason: int(count) for reason, count in _OWN_REASON.findall(reasons)}
    return LoadReport(**fields, num_requests_waiting=waiting) if len(waiting) == reasons.count("=") else None


def decode_metrics(value: str) -> dict[str, float]:
    """The figures of any engine's report: standard ORCA fields by their names, `named_metrics` without prefix.

    Raises `LoadReportError` on an unreadable report and on values that are not finite or are negative, as Envoy drops those
    too.
    """
    if len(value) > MAX_REPORT_BYTES:
        raise LoadReportError(f"report of {len(value)} bytes; at most {MAX_REPORT_BYTES} are read")
    word, _, rest = value.strip().partition(" ")
    match word.upper():
        case "TEXT":
            metrics = _from_text(rest)
        case "JSON":
            metrics = _from_json(rest)
        case "BIN":
            metrics = _from_bin(rest)
        case _:  # the dialect without a format word
            metrics = _from_json(value) if value.lstrip().startswith("{") else _from_text(value)
    for name, figure in metrics.items():
        if not 0 <= figure < math.inf:
            raise LoadReportError(f"{name} is {figure}")
    return metrics


def _from_text(text: str) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for item in text.split("," if "," in text else ";"):
        name, separator, figure = item.partition("=")
        if not separator and ":" in item:
            name, separator, figure = item.rpartition(":")  # a name may begin with that of its engine: `vllm:…`
        name = name.strip().removeprefix(_NAMED)
        if not name and not separator:  # a comma too many
            continue
        if not separator or not name:
            raise LoadReportError(f"{item!r} is not name=value")
        if name in metrics:
            raise LoadReportError(f"{name} occurs twice")
        try:
            metrics[name] = float(figure)
        except ValueError:
            raise LoadReportError(f"{item!r} is not a number") from None
    return metrics


def _from_json(text: str) -> dict[str, float]:
    try:
        body = msgspec.json.decode(text, type=dict[str, float | dict[str, float]])
    except msgspec.MsgspecError as error:
        raise LoadReportError(f"not a JSON load report: {error}") from None
    metrics: dict[str, float] = {}
    for name, figure in body.items():
        metrics.update(figure if isinstance(figure, dict) else {name: figure})
    return metrics


# --- the protobuf form, without the protobuf library: doubles and map<string, double> are all there is ---

_SCALARS = {1: "cpu_utilization", 2: "mem_utilization", 6: "rps_fractional", 7: "eps", 9: "application_utilization"}
_MAPS = (4, 5, 8)  # request_cost, utilization, named_metrics
_NAMED_METRICS = 8
_DOUBLE, _BYTES, _VARINT, _FLOAT = 1, 2, 0, 5


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _to_proto(utilization: float, metrics: Mapping[str, float]) -> bytes:
    out = bytearray(struct.pack("<Bd", 9 << 3 | _DOUBLE, utilization))
    for name, value in metrics.items():
        key = name.encode()
        entry = bytes([1 << 3 | _BYTES]) + _varint(len(key)) + key + struct.pack("<Bd", 2 << 3 | _DOUBLE, value)
        out += bytes([_NAMED_METRICS << 3 | _BYTES]) + _varint(len(entry)) + entry
    return bytes(out)


def _proto_fields(data: bytes) -> Iterator[tuple[int, float | bytes | int]]:
    """(field number, value) pairs of one message; raises `LoadReportError` where the bytes end too early."""
    at = 0

    def varint() -> int:
        nonlocal at
        number = shift = 0
        while True:
            byte = data[at]
            at += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
            shift += 7

    try:
        while at < len(data):
            field, wire = divmod(varint(), 8)
            if wire == _DOUBLE:
                yield field, struct.unpack_from("<d", data, at)[0]
                at += 8
            elif wire == _VARINT:
                yield field, varint()
            elif wire == _FLOAT:  # none that is known
                at += 4
                if at > len(data):
                    raise LoadReportError("truncated protobuf")
            elif wire == _BYTES:
                size = varint()
                if at + size > len(data):
                    raise LoadReportError("truncated protobuf")
                yield field, data[at : at + size]
                at += size
            else:
                raise LoadReportError(f"protobuf wire type {wire}")
    except (IndexError, struct.error):
        raise LoadReportError("truncated protobuf") from None


def _from_bin(text: str) -> dict[str, float]:
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError as error:  # binascii.Error is one
        raise LoadReportError(f"not base64: {error}") from None
    metrics: dict[str, float] = {}
    for field, value in _proto_fields(data):
        if isinstance(value, float) and field in _SCALARS:
            metrics[_SCALARS[field]] = value
        elif isinstance(value, bytes) and field in _MAPS:
            entry = dict(_proto_fields(value))
            name, figure = entry.get(1, b""), entry.get(2, 0.0)
            if not isinstance(name, bytes) or not isinstance(figure, float):
                raise LoadReportError("malformed map entry")
            metrics[name.decode(errors="replace")] = figure
    return metrics
