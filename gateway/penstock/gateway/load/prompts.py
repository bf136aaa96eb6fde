"""From a request's body to token counts and block hashes, with the replicas' own tokenizer and template.

Each ready Penstock replica serves its `PromptBundle`. For other engines, a folder with the tokenizer can be given. Bundles that
count and hash alike share one memory of prefixes. During a rollout prompts are hashed for both revisions.
"""

import asyncio
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from aiohttp import ClientResponse, ClientTimeout

from penstock.api.fleet import Replica
from penstock.gateway.load.compiled_hasher import CompiledMemo
from penstock.gateway.load.replica_client import ReplicaClient
from penstock.gateway.load.tokenized import TokenizedPrompts, by_bytes, exact, extra_keys, guessed_tokens, space_of
from penstock.gateway.load.traits import FOREIGN_SEED
from penstock.gateway.picker.candidates import ReplicaKey, key_of
from penstock.gateway.picker.request import HashSpace, Prompt
from penstock.gateway.picker.state import FleetState
from penstock.http.replica_answers import body_of
from penstock.plain_errors import words_of
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.errors import PromptError
from penstock.prompt.hashing import ExtraKeys
from penstock.prompt.memo import PrefixMemo, Unremembered
from penstock.prompt.processor import PromptProcessor

log = logging.getLogger(__name__)
_T = TypeVar("_T")

THREADS = 2
TICK_S = 0.25
FETCH_S = 10.0
"""How long a bundle may take to arrive, and how long the replicas of a pool wait for the first one's at most."""
RETRY_S = 2.0
ASKED_AT_ONCE = 8
"""Replicas whose bundles are asked for at one time."""
TOKENIZE_TIMEOUT_S = 0.5
"""A pick is not worth more: the request then goes without residency."""
INLINE_BYTES = 4096
"""Up to here (about 0.3 ms) handing a prompt to a thread costs more than tokenising it."""
REMEMBERED_BYTES = 32 * 1024
"""Up to here a prompt of which all but so much is remembered is hashed without a thread, in about half a millisecond."""
INLINE_PROMPTS = 16
"""Likewise: each prompt of a list is a call of the tokenizer's."""
MAX_BUNDLE_BYTES = 256 * 2**20
"""Largest prompt bundle. The largest tokenizers have about 35 MB."""
SPACES = 2
"""Hash spaces in which a prompt is hashed at most: the old and the new revision of a rollout."""
NO_BUNDLE = "no replica has given its prompt bundle yet"
SWITCH_S = 0.0005
"""How long a thread that tokenises may hold the interpreter while the event loop waits (Python's own: 5 ms)."""


class _Known(NamedTuple):
    """What is kept of a bundle."""

    space: bytes
    max_model_len: int | None


_Memos = Sequence[tuple[PrefixMemo, frozenset[ReplicaKey]]]
"""What tokenises in each hash space, and the replicas that are in it."""
Groups = tuple[_Memos, frozenset[ReplicaKey]]


class PromptLibrary:
    """The prompt processors of the fleet.

    Args:
        state: The fleet.
        tokenizers: Folders in Hugging Face format by served name, for models that engines of others serve.
    """

    def __init__(self, state: FleetState, tokenizers: Mapping[str, Path] | None = None) -> None:
        self._state = state
        self._folders = dict(tokenizers or {})
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")
        self._overdue = 0
        """Threads that still work for callers that gave up."""
        self._memos: dict[bytes, PrefixMemo] = {}
        self._bundles: dict[str, _Known] = {}
        """Bundles by digest."""
        self._digests: dict[ReplicaKey, tuple[int | None, str]] = {}
        """(epoch at the time, digest) of each replica's bundle."""
        self._retry_at: dict[ReplicaKey, float] = {}
        self._building: dict[bytes, asyncio.Future[PrefixMemo]] = {}
        """What a thread makes now, by hash space."""
        self._first: dict[str, asyncio.Future[bool]] = {}
        """By pool, the replica of it that is asked before the others: whether it has given its bundle."""
        self._arriving: dict[str, asyncio.Future[None]] = {}
        """Bundles that are downloaded, parsed or built now, by digest. A future ends with that, well or not."""
        self._asked = asyncio.Semaphore(ASKED_AT_ONCE)
        self._groups: dict[int, tuple[Sequence[Replica], Groups]] = {}
        """See `spaces`; by the identity of the list of replicas, which never changes."""
        sys.setswitchinterval(SWITCH_S)

    async def run(self, client: ReplicaClient) -> None:
        """Fetches the bundles of replicas that became ready or have restarted, until cancelled."""
        while True:
            replicas = self._state.directory.replicas
            for gone in (self._digests.keys() | self._retry_at.keys()) - replicas.keys():
                self._digests.pop(gone, None)
                self._retry_at.pop(gone, None)
            used = {digest for _, digest in self._digests.values()}
            self._bundles = {digest: self._bundles[digest] for digest in used}
            spaces = {known.space for known in self._bundles.values()}
            self._memos = {space: self._memos[space] for space in spaces}
            self._groups.clear()
            now = time.monotonic()
            wanted = [key for key, replica in replicas.items() if replica.ready and not self._is_current(key)]
            await self._learn_all(client, [replicas[key] for key in wanted if self._retry_at.get(key, now) <= now])
            await asyncio.sleep(TICK_S)

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def at_once(
        self, replicas: Sequence[Replica], path: str, raw: bytes, body: Mapping[str, Any], tenant: str, adapter: str | None
    ) -> TokenizedPrompts | None:
        """Token counts and block hashes of the prompts in `body`, where that is little work. None: it is not, and `in_thread` has
        to do it.

        What cannot be tokenised is guessed from its bytes and said to be a guess: the engine is the judge of a prompt.

        Args:
            replicas: Those of the model.
            path: Of the request.
            raw: The body as it came.
            body: The same, parsed.
            tenant: Whose request it is: the engine keeps the caches of tenants apart.
            adapter: The LoRA adapter: no KV is shared between adapters.
        """
        memos, silent = self.spaces(replicas)
        size = len(raw)
        if size > (REMEMBERED_BYTES if memos else INLINE_BYTES) or _many(body):
            return None
        try:
            extra, most = extra_keys(body, tenant, adapter), None if size <= INLINE_BYTES else INLINE_BYTES
            return _tokenized(memos, silent, path, body, extra, most)
        except Unremembered:
            return None
        except PromptError as error:
            return _guessed(memos, silent, raw, str(error))

    async def in_thread(
        self, replicas: Sequence[Replica], path: str, raw: bytes, body: Mapping[str, Any], tenant: str, adapter: str | None
    ) -> TokenizedPrompts:
        """As `at_once`, however much work that is."""
        (memos, silent), extra = self.spaces(replicas), extra_keys(body, tenant, adapter)
        try:
            return await self._work(lambda: _tokenized(memos, silent, path, body, extra, None))
        except (PromptError, TimeoutError) as error:  # megabytes: not worth the wait
            return _guessed(memos, silent, raw, str(error) or f"tokenising took more than {TOKENIZE_TIMEOUT_S} s")

    async def _work(self, job: Callable[[], _T]) -> _T:
        """Raises `TimeoutError` for a job that takes too long, which a thread cannot be told to leave; and for any while as many
        such are still at it as there are threads: it would wait for nothing."""
        if self._overdue >= THREADS:
            raise TimeoutError
        future = self._pool.submit(job)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), TOKENIZE_TIMEOUT_S)
        except TimeoutError:
            if not future.cancelled():  # it had begun, and goes on
                self._overdue += 1
                loop = asyncio.get_running_loop()
                future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._over))
            raise

    def _over(self) -> None:
        self._overdue -= 1

    def _memo_of(self, bundle: PromptBundle) -> PrefixMemo:
        compiled = self._state.compiled
        return PrefixMemo(PromptProcessor(bundle)) if compiled is None else CompiledMemo(PromptProcessor(bundle), compiled)

    def spaces(self, replicas: Sequence[Replica]) -> Groups:
        """The hash spaces of most of these replicas; and the ready replicas of others' engines that are in none."""
        known = self._groups.get(id(replicas))
        if known is not None and known[0] is replicas:
            return known[1]
        spaces: dict[bytes, set[ReplicaKey]] = defaultdict(set)
        silent: set[ReplicaKey] = set()
        for replica in replicas:
            key = key_of(replica)
            if not replica.ready:
                continue
            if key in self._digests:
                spaces[self._bundles[self._digests[key][1]].space].add(key)
            elif not self._state.ours(key):
                silent.add(key)
        most = sorted(spaces, key=lambda space: (-len(spaces[space]), space))[:SPACES]
        result = [(self._memos[space], frozenset(spaces[space])) for space in most], frozenset(silent)
        self._groups[id(replicas)] = replicas, result
        return result

    def max_model_len(self, replicas: Iterable[Replica]) -> int | None:
        """Tokens of prompt and output together that all of these replicas take; None where none has said so yet."""
        known = (self._digests.get(key_of(replica)) for replica in replicas)
        lengths = (self._bundles[it[1]].max_model_len for it in known if it is not None)
        return min((length for length in lengths if length is not None), default=None)

    def _is_current(self, key: ReplicaKey) -> bool:
        known = self._digests.get(key)
        return known is not None and known[0] == self._epoch(key)

    def _epoch(self, key: ReplicaKey) -> int | None:
        """What changes when a bundle may have: an engine of others has said its block size."""
        if not self._state.ours(key):
            return self._state.traits(key).block_size
        heard = self._state.reports.get(key)
        return heard.report.epoch if heard else None

    async def _learn_all(self, client: ReplicaClient, replicas: Sequence[Replica]) -> None:
        async with asyncio.TaskGroup() as group:
            for replica in replicas:
                group.create_task(self._learn_in_turn(client, replica))

    async def _learn_in_turn(self, client: ReplicaClient, replica: Replica) -> None:
        """One of each pool goes first: the others then need only say that theirs is the same. Where it gives none, the next one
        goes first. Where it gives none in time, all of them go."""
        loop = asyncio.get_running_loop()
        until = loop.time() + FETCH_S
        while (first := self._first.get(replica.pool)) is not None:
            ended, _ = await asyncio.wait([first], timeout=until - loop.time())
            if not ended or first.result():
                await self._learn(client, replica)
                return
        self._first[replica.pool] = first = loop.create_future()
        given = False
        try:
            given = await self._learn(client, replica)
        finally:
            del self._first[replica.pool]
            first.set_result(given)

    async def _learn(self, client: ReplicaClient, replica: Replica) -> bool:
        """Whether the replica has given its bundle."""
        key = key_of(replica)
        epoch = self._epoch(key)
        try:
            if self._state.ours(key):
                digest = await self._fetch(client, replica)
            else:
                digest = await self._read(replica)
        except Exception as error:  # noqa: BLE001 - a tokenizer is a program of others: whatever it does, one replica has no bundle
            log.warning("no prompt bundle from %s: %s", replica.title, words_of(error))
            digest = None
        if digest is None:
            self._retry_at[key] = time.monotonic() + RETRY_S
        else:
            self._digests[key] = (epoch, digest)
        self._groups.clear()
        return digest is not None

    async def _fetch(self, client: ReplicaClient, replica: Replica) -> str:
        """The digest of what the replica serves. A bundle that is on its way from another replica is waited for; where that one
        fails, this one's is taken."""
        loop = asyncio.get_running_loop()
        until = loop.time() + FETCH_S
        while True:
            # Replicas that fail one after another may not keep this one from giving its own.
            arriving = self._arriving if loop.time() < until else {}
            asked = dict(arriving)
            known = ", ".join(f'"{digest}"' for digest in (*self._bundles, *asked))
            headers = {"if-none-match": known} if known else {}
            async with self._asked, client.get(replica, "/prompt-bundle", ClientTimeout(total=FETCH_S), headers) as response:
                response.raise_for_status()
                digest = response.headers.get("etag", "").removeprefix("W/").strip('"')
                other = asked.get(digest) or arriving.get(digest)
                if other is None and digest not in self._bundles:
                    return await self._take(digest, response)
            if other is not None:
                await asyncio.wait([other])
            if digest in self._bundles:
                return digest

    async def _take(self, digest: str, response: ClientResponse) -> str:
        """The digest of the bundle in a response, downloaded, parsed and built."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        if digest:  # else nobody can ask whether it is the same
            self._arriving[digest] = ended
        try:
            data = await body_of(response, MAX_BUNDLE_BYTES) if response.status == 200 else b""
            bundle = await loop.run_in_executor(self._pool, PromptBundle.from_json, data)
            return await self._load(bundle, bundle.max_model_len)
        finally:
            if self._arriving.get(digest) is ended:
                del self._arriving[digest]
            ended.set_result(None)

    async def _read(self, replica: Replica) -> str | None:
        """The digest of the tokenizer that was given for the replica's model; None where there is none."""
        names = self._state.directory.names_at(replica)
        name = next((name for name in names if name in self._folders), None)
        if name is None:
            return None
        size = self._state.traits(key_of(replica)).block_size
        bundle = await asyncio.get_running_loop().run_in_executor(self._pool, _bundle_of, self._folders[name], name, size)
        return await self._load(bundle, None)

    async def _load(self, bundle: PromptBundle, max_model_len: int | None) -> str:
        digest = bundle.digest
        if digest not in self._bundles:
            space = space_of(bundle)
            if space not in self._memos:
                if space not in self._building:  # others that come meanwhile wait for the same
                    job = asyncio.get_running_loop().run_in_executor(self._pool, self._memo_of, bundle)
                    self._building[space] = job
                    job.add_done_callback(lambda _: self._building.pop(space, None))
                self._memos[space] = await asyncio.shield(self._building[space])
            self._bundles[digest] = _Known(space, max_model_len)
        return digest


def _tokenized(
    memos: _Memos, silent: frozenset[ReplicaKey], path: str, body: Mapping[str, Any], extra: ExtraKeys, most: int | None
) -> TokenizedPrompts:
    """The prompts of a body, of which the tokenizer may read `most` bytes. Raises `PromptError` and `Unremembered`."""
    if not memos:
        return TokenizedPrompts(prompts=by_bytes(body, extra), comparable=silent, unknown=NO_BUNDLE)
    (prompts, block_size, keys), *others = [
        (exact(memo, path, body, extra, most), memo.processor.bundle.block_size, keys) for memo, keys in memos
    ]
    return TokenizedPrompts(
        prompts=prompts,
        block_size=block_size,
        comparable=keys | silent if silent else keys,  # what tells nothing of its cache is predicted, by any hashes
        elsewhere=tuple([HashSpace(prompts=its, block_size=size, replicas=there) for its, size, there in others]),
    )


def _guessed(memos: _Memos, silent: frozenset[ReplicaKey], raw: bytes, why: str) -> TokenizedPrompts:
    """A guess by the bytes of a body."""
    prompts = (Prompt(guessed_tokens(raw)),)
    if not memos:
        return TokenizedPrompts(prompts=prompts, comparable=silent, unknown=NO_BUNDLE)
    return TokenizedPrompts(prompts=prompts, unknown=f"its prompt cannot be tokenised: {why}")


def _bundle_of(folder: Path, name: str, block_size: int) -> PromptBundle:
    """The bundle of an engine that serves none: it judges lengths itself."""
    return PromptBundle.from_checkpoint(
        folder, served_names=(name,), block_size=block_size, hash_seed=FOREIGN_SEED, max_model_len=2**31 - 1
    )


def _many(body: Mapping[str, Any]) -> bool:
    """Whether the prompt is a list of many prompts, and not one of token ids."""
    prompt = body.get("prompt")
    return isinstance(prompt, list) and len(prompt) > INLINE_PROMPTS and not isinstance(prompt[0], int)
