"""From a request's body to token counts and block hashes, with the tokenizer and template that the replicas themselves use.

Each ready replica serves its `PromptBundle`; bundles are told apart by digest, so that replicas of one revision share one
processor, and during a rollout the hashes are those of the bundle that most ready replicas have.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import msgspec

from penstock.api.fleet import Replica
from penstock.gateway.picker.candidates import ReplicaKey, key_of
from penstock.gateway.picker.request import Prompt
from penstock.gateway.picker.state import FleetState
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.errors import BundleError, PromptError
from penstock.prompt.hashing import BlockHasher, ExtraKeys
from penstock.prompt.processor import PromptProcessor

log = logging.getLogger(__name__)

THREADS = 2
TICK_S = 0.25
FETCH_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
RETRY_S = 2.0
TOKENIZE_TIMEOUT_S = 0.5
"""A pick is not worth more: the request then goes without residency."""
INLINE_BYTES = 4096
"""Up to here (about 0.3 ms) handing a prompt to a thread costs more than tokenising it."""
BYTES_PER_TOKEN = 4
"""For the guess where a prompt could not be tokenised."""


class TokenizedPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of one request."""

    prompts: tuple[Prompt, ...]
    block_size: int = 16
    comparable: frozenset[ReplicaKey] = frozenset()
    """The replicas in whose hash space the block hashes are."""
    unknown: str | None = None
    """Why `prompts` is a guess; None where it is exact."""


class PromptLibrary:
    """The prompt processors of the fleet."""

    def __init__(self, state: FleetState) -> None:
        self._state = state
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")
        self._processors: dict[str, PromptProcessor] = {}
        self._digests: dict[ReplicaKey, tuple[int | None, str]] = {}
        """(epoch at the time, digest) of each replica's bundle."""
        self._retry_at: dict[ReplicaKey, float] = {}

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Fetches the bundles of replicas that became ready or have restarted, until cancelled."""
        while True:
            replicas = self._state.replicas()
            for gone in (self._digests.keys() | self._retry_at.keys()) - replicas.keys():
                self._digests.pop(gone, None)
                self._retry_at.pop(gone, None)
            used = {digest for _, digest in self._digests.values()}
            self._processors = {digest: self._processors[digest] for digest in used}
            now = time.monotonic()
            wanted = [key for key, replica in replicas.items() if replica.ready and not self._is_current(key)]
            await asyncio.gather(*(self._fetch(session, replicas[key]) for key in wanted if self._retry_at.get(key, now) <= now))
            await asyncio.sleep(TICK_S)

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def tokenize(self, replicas: Iterable[Replica], path: str, raw: bytes, body: Mapping[str, Any]) -> TokenizedPrompts:
        """Token counts and block hashes of the prompts in `body`.

        What cannot be tokenised is guessed from its bytes and said to be a guess: the engine is the judge of a prompt.

        Args:
            replicas: Those of the model.
            path: Of the request.
            raw: The body as it came.
            body: The same, parsed.
        """
        ready = [key_of(replica) for replica in replicas if replica.ready]
        digests = {key: self._digests[key][1] for key in ready if key in self._digests}
        if not digests:
            return _guess(raw, "no replica has given its prompt bundle yet")
        digest = Counter(digests.values()).most_common(1)[0][0]
        processor = self._processors[digest]
        try:
            if len(raw) <= INLINE_BYTES:
                prompts = _tokenize(processor, path, body)
            else:
                job = asyncio.get_running_loop().run_in_executor(self._pool, _tokenize, processor, path, body)
                prompts = await asyncio.wait_for(job, TOKENIZE_TIMEOUT_S)
        except PromptError as error:
            return _guess(raw, f"its prompt cannot be tokenised: {error}")
        except TimeoutError:
            return _guess(raw, f"tokenising took more than {TOKENIZE_TIMEOUT_S} s")
        same = frozenset(key for key, other in digests.items() if other == digest)
        return TokenizedPrompts(prompts=prompts, block_size=processor.bundle.block_size, comparable=same)

    def _is_current(self, key: ReplicaKey) -> bool:
        known = self._digests.get(key)
        return known is not None and known[0] == self._epoch(key)

    def _epoch(self, key: ReplicaKey) -> int | None:
        heard = self._state.reports.get(key)
        return heard.report.epoch if heard else None

    async def _fetch(self, session: aiohttp.ClientSession, replica: Replica) -> None:
        key = key_of(replica)
        epoch = self._epoch(key)
        known = {"if-none-match": ", ".join(f'"{digest}"' for digest in self._processors)} if self._processors else {}
        url = f"http://{replica.endpoint}/prompt-bundle"
        try:
            async with session.get(url, headers=known, timeout=FETCH_TIMEOUT) as response:
                response.raise_for_status()
                digest = response.headers.get("etag", "").removeprefix("W/").strip('"')
                data = await response.read() if response.status == 200 else b""
            if digest not in self._processors:
                digest = await self._load(data)
        except (aiohttp.ClientError, TimeoutError, BundleError) as error:
            log.warning("no prompt bundle from %s: %r", replica.name, error)
            self._retry_at[key] = time.monotonic() + RETRY_S
            return
        self._digests[key] = (epoch, digest)

    async def _load(self, data: bytes) -> str:
        bundle = PromptBundle.from_json(data)
        digest = bundle.digest
        if digest not in self._processors:
            loop = asyncio.get_running_loop()
            self._processors[digest] = await loop.run_in_executor(self._pool, PromptProcessor, bundle)
        return digest


def _tokenize(processor: PromptProcessor, path: str, body: Mapping[str, Any]) -> tuple[Prompt, ...]:
    bundle = processor.bundle
    salt = body.get("cache_salt")
    extra = ExtraKeys(cache_salt=salt if isinstance(salt, str) else None)
    hasher = BlockHasher(bundle.block_size, bundle.hash_seed)
    return tuple(Prompt(len(tokens), tuple(hasher.hash(tokens, extra))) for tokens in processor.tokens_of(path, body))


def _guess(raw: bytes, why: str) -> TokenizedPrompts:
    return TokenizedPrompts(prompts=(Prompt(len(raw) // BYTES_PER_TOKEN + 1),), unknown=why)
