"""Request traces: what came, when, how long, and which prompts share which blocks."""

import csv
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from random import Random

import msgspec

MOONCAKE_BLOCK = 512
"""Tokens that one of Mooncake's hash ids stands for."""
AZURE_BLOCK = 512
"""Azure's trace says nothing of contents, so any size will do."""


class TraceError(Exception):
    """A trace that is not there or cannot be read; the message names the file."""


def trace_folder(start: Path) -> Path:
    """Return the folder of the recorded traces: the nearest `shared/traces` in a folder above `start`, such as beside the
    repository.

    If there is none, it returns a folder that does not exist, and reading from it fails with its name.
    """
    folders = [parent / "shared/traces" for parent in start.resolve().parents]
    return next((folder for folder in folders if folder.is_dir()), folders[0])


class TraceRequest(msgspec.Struct, frozen=True):
    """One request of a trace."""

    number: int
    """Position in the trace, which is its name."""
    at: float
    """Arrival, seconds after the beginning of the trace."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[bytes, ...]
    """Names of the prompt's full blocks; a name stands for the whole prefix up to its end."""


class Trace(msgspec.Struct, frozen=True):
    """Requests in the order of their arrival."""

    name: str
    block_size: int
    requests: Sequence[TraceRequest]

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].at - self.requests[0].at if self.requests else 0.0

    def scaled(self, duration_s: float) -> "Trace":
        """The same requests in the same order, with all gaps stretched alike so that they arrive within `duration_s`."""
        factor = duration_s / self.duration_s
        requests = [msgspec.structs.replace(request, at=request.at * factor) for request in self.requests]
        return Trace(self.name, self.block_size, requests)

    def first(self, count: int) -> "Trace":
        """Only its first `count` requests."""
        return Trace(self.name, self.block_size, self.requests[:count])

    def thickened(self, copies: int, spread_s: float = 10.0, seed: int = 0) -> "Trace":
        """Return a trace with `copies` times the load in the same time: each request comes that many times, up to `spread_s`
        apart, and copies
        share no prefixes."""
        lots = Random(seed)
        arrivals = [
            (request.at + (lots.uniform(0.0, spread_s) if copy else 0.0), copy, request)
            for copy in range(copies)
            for request in self.requests
        ]
        arrivals.sort(key=lambda arrival: (arrival[0], arrival[1], arrival[2].number))
        requests = [
            msgspec.structs.replace(
                request, number=number, at=at, blocks=tuple(b"%d/%b" % (copy, block) for block in request.blocks)
            )
            for number, (at, copy, request) in enumerate(arrivals)
        ]
        return Trace(self.name, self.block_size, requests)

    def infinite_cache_hits(self) -> float:
        """The share of prompt tokens that one cache which never forgets would supply: no router can reach more."""
        seen: set[bytes] = set()
        hits = total = 0
        for request in self.requests:
            total += request.prompt_tokens
            usable = (request.prompt_tokens - 1) // self.block_size
            depth = next((at for at, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
            hits += min(depth, usable) * self.block_size
            seen.update(request.blocks)
        return hits / total if total else 0.0


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def load_mooncake(path: Path) -> Trace:
    """Mooncake's JSONL (FAST'25): timestamps in ms, one hash id for each 512 tokens, the last one's rest included."""
    decoder = msgspec.json.Decoder(_MooncakeLine)
    requests: list[TraceRequest] = []
    for number, text in enumerate(_read(path).splitlines()):
        try:
            line = decoder.decode(text)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{path}, line {number + 1}: {error}") from None
        full = line.hash_ids[: line.input_length // MOONCAKE_BLOCK]
        blocks = tuple(block.to_bytes(8, "big") for block in full)
        requests.append(TraceRequest(number, line.timestamp / 1000, line.input_length, max(line.output_length, 1), blocks))
    return Trace("mooncake", MOONCAKE_BLOCK, sorted(requests, key=lambda request: request.at))


def load_azure(path: Path) -> Trace:
    """Azure's CSV (LLM inference trace 2023): TIMESTAMP, ContextTokens, GeneratedTokens; no two prompts share anything."""
    requests: list[TraceRequest] = []
    begin: datetime | None = None
    for number, row in enumerate(csv.DictReader(_read(path).decode().splitlines())):
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path}, row {number + 1}: {error!r}") from None
        begin = begin or at
        blocks = tuple(f"{number}/{block}".encode() for block in range(prompt // AZURE_BLOCK))
        requests.append(TraceRequest(number, (at - begin).total_seconds(), prompt, max(output, 1), blocks))
    return Trace("azure", AZURE_BLOCK, sorted(requests, key=lambda request: request.at))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
