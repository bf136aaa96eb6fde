"""Usual requests, which the package decides in one call, from head and body to the booking.

Usual is a chat of our own Envoy, where there are no tenants, that asks for one answer and for nothing special: see `RULES`. It
names a model itself, whose replicas are usual, too (`Picks.usual`), tokenise alike and have room. The stages of the director are
the statement; tests hold this against them.
"""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from penstock.api import headers
from penstock.gateway.extproc.body import LIMITS
from penstock.gateway.extproc.call import Routed
from penstock.gateway.extproc.stages.pick import Pick, on_rank
from penstock.gateway.extproc.stages.resolve import Meaning, Resolve
from penstock.gateway.extproc.underway import Underway
from penstock.gateway.flow.gate import FlowGate
from penstock.gateway.load.compiled_hasher import CompiledMemo
from penstock.gateway.load.prompts import INLINE_BYTES, REMEMBERED_BYTES, Groups, PromptLibrary
from penstock.gateway.load.tokenized import BYTES_PER_TOKEN, DATA_URL
from penstock.gateway.picker.choice import RANKED
from penstock.gateway.picker.columns import Columns
from penstock.gateway.picker.compiled import Compiled
from penstock.gateway.picker.cost import HORIZON_TOKENS
from penstock.gateway.picker.folded import Folding
from penstock.gateway.picker.picks import TOLERANCE
from penstock.gateway.picker.request import Prompt, RequestView
from penstock.gateway.picker.slate import word_of
from penstock.gateway.picker.state import FleetState, Sent
from penstock.prompt.errors import PromptError
from penstock.prompt.memo import Unremembered
from penstock.prompt.processor import CHANGES_CHATS, CHAT_PATH, PARAMS


class Rules(NamedTuple):
    """What is usual about a request, and what the package has to know to read it."""

    wanted_headers: tuple[tuple[str, str], ...]
    """Headers that it must have, with these values."""
    uncommon_headers: tuple[str, ...]
    """Headers that it must not have."""
    length: str
    """The header that says how long its body is."""
    request_id: str
    """The header with its id."""
    uncommon: frozenset[str]
    """Fields that its body must not have."""
    ones: tuple[str, ...]
    """Fields that must be 1 where they are there."""
    limits: tuple[str, ...]
    """Fields with the output tokens that it wants at most."""
    model: str
    """The field that names a model."""
    messages: str
    """The field with the chat."""
    files: bytes
    """What begins a file in its body."""
    bytes_per_token: int
    """Of a prompt, for a guess at its tokens."""
    most_bytes: int
    """Of its body."""
    inline_bytes: int
    """Of a body of which the tokenizer may read all."""
    horizon: int
    """Output tokens whose time counts, at most."""
    tolerance: float
    """Of the policy."""
    ranked: int
    """Candidates of which a decision keeps the figures."""


RULES = Rules(
    wanted_headers=((":method", "POST"), (":path", CHAT_PATH)),
    uncommon_headers=("content-encoding", headers.DECISION, headers.TIMEOUT),
    length="content-length",
    request_id=headers.REQUEST_ID,
    uncommon=CHANGES_CHATS | {"cache_salt", "priority", "prompt"},
    ones=("n", "best_of"),
    limits=LIMITS,
    model="model",
    messages=PARAMS[CHAT_PATH],
    files=DATA_URL,
    bytes_per_token=BYTES_PER_TOKEN,
    most_bytes=REMEMBERED_BYTES,
    inline_bytes=INLINE_BYTES,
    horizon=HORIZON_TOKENS,
    tolerance=TOLERANCE,
    ranked=RANKED,
)


class _Way(NamedTuple):
    """What usual requests of one name have in common."""

    name: str
    meaning: Meaning
    groups: Groups
    columns: Columns
    prices: Folding
    block_size: int


class AtOnce:
    """Decides usual requests.

    Args:
        compiled: The package.
        state: The fleet.
        resolve: Knows what names mean.
        prompts: Knows what tokenises.
        gate: Knows who has room.
        pick: Keeps the record of decisions.
        underway: The requests that have been sent on.
    """

    def __init__(
        self,
        compiled: Compiled,
        state: FleetState,
        *,
        resolve: Resolve,
        prompts: PromptLibrary,
        gate: FlowGate,
        pick: Pick,
        underway: Underway,
    ) -> None:
        self._compiled, self._state = compiled, state
        self._resolve, self._prompts, self._gate = resolve, prompts, gate
        self._pick, self._underway = pick, underway
        self._named_by = state.directory.names
        self._ways: dict[str, tuple[_Way, Any]] = {}
        """What was found for each name, as long as names mean the same, and its `Route`."""
        refusals = PromptError, Unremembered
        self._requests = compiled.Requests(RULES, orjson.loads, self._route, word_of, time.monotonic, refusals)

    def route(self, fields: Mapping[str, str], body: bytes) -> Routed | None:
        """As `PickDirector.preview` and `route` together, of a request's headers and body. None: it is not usual, and nothing has
        changed."""
        decided = self._requests.decide(fields, body)
        if decided is None:
            return None
        way, picked, rates, (tokens, hashes), request_id, max_tokens, guess, (came, now) = decided
        model, booking = way.meaning.model, picked.booking
        self._gate.passed(model, guess, came)
        request = RequestView(
            id=request_id,
            path=CHAT_PATH,
            model=way.name,
            prompts=(Prompt(tokens, hashes),),
            block_size=way.block_size,
            max_tokens=max_tokens,
        )
        way.columns.sent()
        choice = self._state.picks.made(model, request.figures, way.columns, picked, now, rates)
        self._state.sent(model, request, Sent(choice, booking), now)
        routed = Routed(
            endpoints=choice.endpoints,
            pool=choice.replica.pool,
            booking=booking,
            model=model.id,
            name=way.meaning.name,
            came=came,
            choice=choice,
            prompt_tokens=tokens,
            decided=now,
            named=self._underway.name(),
            sets=on_rank(booking.key.rank),
        )
        self._pick.note(request, choice, routed)
        return routed

    def _route(self, name: str, now: float) -> Any:
        """The `Route` of what a name means at a moment; None: its requests are not usual now."""
        meaning, directory = self._resolve.meaning(name), self._state.directory
        if meaning is None or meaning.adapter is not None or meaning.renamed is not None:
            return None
        columns = self._state.picks.usual(meaning.model)
        if columns is None or not self._gate.has_room(meaning.model, now):
            return None
        if directory.names is not self._named_by:
            self._named_by, self._ways = directory.names, {}
        groups, prices = self._prompts.spaces(directory.replicas_of(meaning.model)), columns.prices
        way, route = self._ways.get(name, (None, None))
        if way is None or way.meaning is not meaning or way.groups is not groups or way.prices is not prices:
            way, route = self._ways[name] = self._found(name, meaning, groups, columns)
        return route

    def _found(self, name: str, meaning: Meaning, groups: Groups, columns: Columns) -> tuple[_Way, Any]:
        memos, silent = groups
        memo, keys = memos[0] if len(memos) == 1 and not silent else (None, frozenset())
        chats = memo.usual_chats(INLINE_BYTES) if isinstance(memo, CompiledMemo) else None
        block_size = 0 if memo is None else memo.processor.bundle.block_size
        way = _Way(name, meaning, groups, columns, columns.prices, block_size)
        if chats is None:
            return way, None
        looked_at = self._state.picks.looked_at(columns, keys)
        return way, self._compiled.Route(way, chats, block_size, columns.rates, *looked_at)
