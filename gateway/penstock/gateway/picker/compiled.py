"""The compiled parts of the gateway: a package of its own, `penstock-gateway-native`, written in Rust (`gateway/native`).

Each part has a twin in Python, which is its statement, does the work where the package is not installed, and is what tests hold
the compiled one against.
"""

import importlib
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.figures import Figures, Floats, Rates
from penstock.gateway.residency.index import MAX_BLOCKS, MAX_BLOCKS_PER_REPLICA, Knowledge, ResidencyIndex

PACKAGE, MODULE = "penstock-gateway-native", "penstock_gateway_native"
INTERFACE = 21
"""Number of what follows; rises with each change of it. A package with another number is not used."""

log = logging.getLogger(__name__)


Encode = Callable[[list[str]], list[list[int]]]
"""The tokens of each of some texts."""


class TextHasher(Protocol):
    """Hashes texts of one tokenizer that `penstock.prompt.cuts.Cutter.by_words` cuts; remembers the tokens of their words, and
    their beginnings. Thread-safe."""

    held: int
    """Bytes of what it remembers of beginnings."""

    def text(
        self,
        text: str,
        encode: Encode,
        most: int | None,
        every: bytes,
        first: bytes,
        before: Sequence[int],
        after: Sequence[int],
    ) -> tuple[int, Sequence[bytes]]:
        """The number of tokens of a text, and the hashes of its blocks. Raises `UnicodeEncodeError` for half of a surrogate pair,
        and what `encode` raises.

        Args:
            text: Any.
            encode: Is asked for words that are not remembered.
            most: Bytes of words that are not remembered up to which they are read by the merges; None: there is no limit.
            every: What each block holds behind its tokens.
            first: What the first block holds besides.
            before: Tokens before those of the text.
            after: Tokens after those of the text.
        """
        ...

    def chat(
        self,
        messages: object,
        skeleton: Callable[[Sequence[tuple[str, bool]]], Sequence[str | tuple[int, bool]] | None],
        longest: int,
        encode: Encode,
        most: int | None,
        every: bytes,
        first: bytes,
    ) -> tuple[int, Sequence[bytes]] | None:
        """The same of a chat's text. None where that is not for the package: messages that have more than a role and a content or
        are otherwise unusual, a text that is long or empty, a template that does more than to copy contents.

        Args:
            messages: Of the body.
            skeleton: `penstock.prompt.processor.PromptProcessor.skeleton`, which is asked once for chats of one shape.
            longest: Bytes of a text that is not too long.
            encode: As in `text`, as `most`, `every` and `first`.
        """
        ...


Place = tuple[str, str]
"""A field, after the namespace that has it."""


class Wire(Protocol):
    """Reads and writes messages of ext_proc; see `penstock.gateway.extproc.wire.Wire`."""

    def read(self, data: bytes) -> tuple[Any, ...]:
        """The fields of a `penstock.gateway.extproc.wire.Message`, `modes` as a tuple. Raises `ValueError`."""
        ...

    def picked(
        self,
        mutation: bytes,
        sets: Sequence[tuple[str, str]],
        removes: Sequence[str],
        metadata: Sequence[tuple[str, Mapping[str, str | float]]],
    ) -> bytes:
        """The answer to a request's headers that sends it to its destination."""
        ...

    def chunk(self, body: bytes, ends: bool) -> bytes:
        """The answer that has a chunk of the request's body."""
        ...


class Picked(Protocol):
    """A choice as figures, and those that it was made of."""

    rows: list[int]
    """The best in order."""
    scores: list[float]
    """Theirs."""
    limit: float
    """The score up to which rows are equal."""
    ttft_s: float
    """Seconds until the first token that the first of them promises."""
    resident_tokens: int
    """Prompt tokens that the first of them has."""
    booking: Any
    """The request's at the first of them; None: it was not asked for."""

    def resident(self) -> bytes:
        """Prompt tokens that each row has, float64 [rows]."""
        ...

    def table(self) -> bytes:
        """The figures of the best rows, float64 [figures, best rows]."""
        ...


CommonRates = tuple[float, float, float, float]
"""Of `Rates` the queue, the inter-token time and the output tokens; and `penstock.gateway.picker.price.crowding`."""


class Said(Protocol):
    """A load report whose fields are made where somebody asks for them."""

    epoch: int
    seq: int

    def fields(self) -> tuple[Any, ...]:
        """All, in the order in which `LoadReport` has them."""
        ...


class ReportReader(Protocol):
    """Reads load reports."""

    def read(self, value: str) -> Said | None:
        """A report that an engine of ours has written as it writes them in TEXT. None for any other text, right or wrong, and
        where a figure is beyond bounds."""
        ...


class UsualResponses(Protocol):
    """Takes in heads of responses."""

    def take_in(self, routed: Any, fields: Mapping[str, str], served: str | None, now: float) -> bool | None:
        """Takes in a head at a moment (monotonic seconds), where that is usual: the `penstock.gateway.extproc.call.Routed` of its
        request, the headers, who answered. Returns whether the answer is streamed. None: it is not usual, and nothing has
        changed."""
        ...


class UsualHeads(Protocol):
    """Takes in heads of responses by the names of their requests."""

    def take_in(self, noted: dict[str, str], fields: dict[str, str], served: str | None) -> bool:
        """What `penstock.gateway.extproc.exchange.Director.returned` does, where the head is usual; False: it is not, and nothing
        has changed."""
        ...


class UsualRequests(Protocol):
    """Decides requests."""

    def decide(self, fields: Mapping[str, str], body: bytes) -> tuple[Any, ...] | None:
        """Picks a replica for a usual request, by its headers and its body, and books it there. None: it is not usual, or nobody
        may take it, and nothing has changed.

        Returns: the `of` of its `Route`; the `Picked`; the rates at that moment; the tokens and the block hashes of its prompt;
        its id; the tokens that it wants at most, or None; about how many tokens its body has; when it came, and when it was
        picked for (monotonic seconds).
        """
        ...


class Compiled(Protocol):
    """What the package has. Arrays are contiguous; bytes stand for booleans."""

    VERSION: str

    def Folded(
        self,
        figures: Floats,
        seeds: NDArray[np.uint64],
        folded: Floats,
        may: Sequence[int],
        rows: dict[ReplicaKey, int],
        few: int,
        common: Callable[[Rates], CommonRates],
    ) -> Any:
        """A `penstock.gateway.picker.folded.Folding`, which `pick` and `Bookings` know besides. Its `report` is
        `penstock.gateway.picker.columns.Columns.heard`, where that is usual.

        Args:
            figures: float64 [figures, rows]; is read and written where it lies.
            seeds: What the lots of each row are drawn from.
            folded: The numbers, float64 [12, rows].
            may: Whether each row may be picked.
            rows: The row of each replica.
            few: Changed rows up to which they alone are folded.
            common: What prices look at of rates.
        """
        ...

    def rank(
        self,
        folded: Floats,
        figures: Floats,
        resident: Floats,
        prompt_tokens: int,
        tokens: int,
        seeds: NDArray[np.uint64],
        word: int,
        tolerance: float,
        most: int,
        other_s: Floats | None,
        may: NDArray[np.uint8] | None,
        last_resorts: NDArray[np.uint8] | None,
        limit: float | None,
    ) -> tuple[list[int], list[float], float, float]:
        """The best `most` rows in order, their scores, the score up to which they are equal (`limit` where that is given), and
        the seconds until the first token that the first of them promises."""
        ...

    def pick(
        self,
        prices: Any,
        index: ResidencyIndex,
        coming: Any,
        hashes: Sequence[bytes],
        block_size: int,
        among: NDArray[np.uint8] | None,
        rates: Rates,
        now: float,
        prompt_tokens: int,
        tokens: int,
        word: int,
        tolerance: float,
        most: int,
        books: tuple[str, int] | None,
    ) -> Picked:
        """The choice for a request with one prompt, after `index` and `coming` were asked what the caches have of it or will
        have, and prices were folded. The request is then booked as `penstock.gateway.picker.state.FleetState.book` does.

        Args:
            prices: Made by `Folded`.
            index: A compiled one.
            coming: Made by `Coming`.
            hashes: Those of the prompt.
            block_size: Tokens in a block.
            among: The rows whose caches count; None: all.
            rates: As in `penstock.gateway.picker.folded.Folding.table`, as `now`.
            books: Id and answers of the request; None: it is not booked.
        """
        ...

    def Bookings(self, states: tuple[str, ...], booked: type[Any], released: dict[str, int], expiry_s: float) -> Any:
        """Compiled `penstock.gateway.picker.bookings.Bookings`, which change the figures of the replicas that `placed` was told.

        Args:
            states: Those of a booking, in order.
            booked: Makes what is outstanding of its three numbers.
            released: Counts ends by cause.
            expiry_s: Seconds after which a booking ends by itself.
        """
        ...

    def Responses(
        self,
        bookings: Any,
        reader: ReportReader,
        heard: Mapping[ReplicaKey, Any],
        troubled: Mapping[ReplicaKey, Any],
        ours: Callable[[ReplicaKey], bool],
        loads: Sequence[str],
    ) -> UsualResponses:
        """What takes in usual responses: its `take_in` is `penstock.gateway.extproc.stages.respond.Respond.take_in` where the
        request has no prefill replica and the replica of its booking has answered with 2xx, without a report or with a later one
        of the same process as `reader` reads them, and none is troubled.

        Args:
            bookings: Made by `Bookings`.
            reader: Made by `ReportReader`.
            heard: The newest reports: `penstock.gateway.load.reports.ReportStore.heard`.
            troubled: `penstock.gateway.picker.outliers.Outliers.records`.
            ours: Whether a replica has an engine of ours.
            loads: The headers with reports: what `reader` reads, and another encoding.
        """
        ...

    def Heads(
        self,
        responses: UsualResponses,
        routed: Mapping[str, Any],
        unwatched: set[str],
        name: str,
        clock: Callable[[], float],
        told: Callable[[Any, str, float, bool], None],
    ) -> UsualHeads:
        """What takes in heads that `responses` finds usual.

        Args:
            responses: Made by `Responses`.
            routed: The `penstock.gateway.extproc.call.Routed` of each request, as it is now.
            unwatched: Those whose responses have not been seen.
            name: The note that has a request's name.
            clock: Monotonic seconds.
            told: Hears of each that was taken in: the request, the status, the moment, and whether the answer is streamed.
        """
        ...

    def Route(
        self,
        of: object,
        chats: tuple[Any, ...],
        block_size: int,
        rates: Callable[[float], Rates],
        prices: Any,
        index: ResidencyIndex,
        coming: Any,
        among: NDArray[np.uint8] | None,
    ) -> object:
        """What is the same for all usual requests of one name, as long as its model's replicas are the same.

        Args:
            of: Whatever Python knows of it besides.
            chats: A `penstock.gateway.load.compiled_hasher.UsualChats`.
            block_size: Tokens in a block.
            rates: `penstock.gateway.picker.columns.Columns.rates`.
            prices: As in `pick`, as `index`, `coming` and `among`.
        """
        ...

    def Requests(
        self,
        rules: object,
        read: Callable[[bytes], object],
        route: Callable[[str, float], Any],
        word: Callable[[str], int],
        clock: Callable[[], float],
        refusals: tuple[type[Exception], ...],
    ) -> UsualRequests:
        """What decides usual requests; see `penstock.gateway.extproc.at_once`.

        Args:
            rules: A `penstock.gateway.extproc.at_once.Rules`.
            read: Reads JSON; raises `ValueError`.
            route: The `Route` of what a name means at a moment; None: its requests are not usual now.
            word: `penstock.gateway.picker.slate.word_of`.
            clock: Monotonic seconds.
            refusals: What hashing raises for prompts that it does not hash.
        """
        ...

    def Coming(self, bookings: Any, most: int) -> Any:
        """A compiled `penstock.gateway.picker.coming.Coming` that knows so many prompts."""
        ...

    def chain(self, parent: bytes, tokens: "array[int]", block_size: int, every: bytes, first: bytes) -> list[bytes]:
        """The chained hashes of the full blocks of `tokens`, uint32, after the block `parent`: behind its tokens each block holds
        `every`, and the first one `first`."""
        ...

    def text_bytes(self, body: bytes, opening: bytes) -> int:
        """`penstock.gateway.load.tokenized.text_bytes`. `opening`: what files begin with."""
        ...

    def BlockHashes(self, packed: bytes) -> Sequence[bytes]:
        """The names of blocks, which are concatenated in `packed`, for a `ResidencyIndex` that need not look at each."""
        ...

    def TextHasher(
        self,
        block_size: int,
        root: bytes,
        apart: Sequence[str],
        merges: tuple[Any, ...] | None,
        key: bytes,
        piece: int,
        most_bytes: int,
    ) -> TextHasher:
        """A `TextHasher` that remembers nothing yet. Raises `ValueError` for merges that are none.

        Args:
            block_size: In tokens.
            root: The parent of first blocks.
            apart: `penstock.prompt.cuts.Cutter.apart`.
            merges: A `penstock.gateway.load.merges.Merges`; None: new words are for the tokenizer.
            key: Secret; names what is remembered of texts.
            piece: Bytes of a piece of a text, at least. A text of fewer is not remembered.
            most_bytes: Of what is remembered of their beginnings.
        """
        ...

    def Wire(self, names: Sequence[str], subset: Place, log: str, notes: Sequence[str], served: Place, address: Place) -> Wire:
        """What reads and writes messages.

        Args:
            names: Of headers that are read.
            subset: Where the subset's hint is in a request's metadata.
            log: The namespace of the notes that a response comes with.
            notes: Their names; without the first there are none.
            served: Where a response's metadata says who answered.
            address: Where its attributes do.
        """
        ...

    def ReportReader(
        self, fields: Sequence[tuple[str, bool]], waiting: str, reasons: Sequence[str], place: int, beyond: float
    ) -> ReportReader:
        """What reads load reports.

        Args:
            fields: Names of the figures in order, and whether each is a whole number.
            waiting: Name of the figure after them, which is counted by reason besides.
            reasons: All that there are.
            place: Where the counts by reason stand among the fields.
            beyond: The least figure that no replica can have.
        """
        ...

    def BlockCache(self) -> object:
        """What connections have seen of header blocks; see `penstock.gateway.h2.blocks.BlockCache`."""
        ...

    def Exchanges(
        self,
        path: str,
        phase: tuple[str, str],
        wire: object,
        most_bytes: int,
        chunk_bytes: int,
        head: bytes,
        ok: bytes,
        ok_alone: bytes,
        usual: object,
        heads: UsualHeads | None,
    ) -> object:
        """What exchanges of ext_proc have in common that connections take in by themselves; see
        `penstock.gateway.extproc.whole`.

        Args:
            path: Of the method.
            phase: The header of calls that have a request and not its response.
            wire: Made by `Wire`.
            most_bytes: Of a request; calls take larger ones.
            chunk_bytes: Of a request's body in one message.
            head: The header block of an answer.
            ok: The trailers of one that was right.
            ok_alone: The same where there is no answer before them.
            usual: What usual answers to requests have in common: a `penstock.gateway.extproc.answers.Usual`.
            heads: Takes in usual heads of responses; None: all are told of.
        """
        ...

    def Connection(
        self,
        accept: Callable[[Any], Any],
        cache: object,
        now: float,
        limits: object,
        exchanges: object | None = None,
        taker: object | None = None,
    ) -> Any:
        """A `penstock.gateway.h2.forms.Connection`.

        Args:
            accept: Who takes new streams.
            cache: Made by `BlockCache`.
            now: Monotonic seconds.
            limits: What has the figures of `penstock.gateway.h2.limits`.
            exchanges: Made by `Exchanges`: what it takes in by itself; None: nothing.
            taker: Who hears of those: a `penstock.gateway.extproc.whole.Taker`.
        """
        ...

    def ResidencyIndex(self, per_replica: int, total: int, unknown: Knowledge) -> ResidencyIndex:
        """A compiled `ResidencyIndex`."""
        ...


def installed() -> Compiled | None:
    """The package, as the log says; None where it is not installed, or is of another version than this one."""
    try:
        module = importlib.import_module(MODULE)
    except ModuleNotFoundError:
        log.info("picks are made in Python: %s is not installed", PACKAGE)
        return None
    found = getattr(module, "INTERFACE", None), tuple(getattr(module, "FIGURES", ()))
    if found != (INTERFACE, Figures._fields):
        its = getattr(module, "VERSION", "without a version")  # a folder that an uninstalled package has left is a module, too
        log.warning("picks are made in Python: %s %s is of another version", PACKAGE, its)
        return None
    log.info("picks are made by %s %s", PACKAGE, module.VERSION)
    return cast(Compiled, module)


def name_of(compiled: Compiled | None) -> str:
    """What makes picks, for people: `python`, or the package with its version."""
    return "python" if compiled is None else f"{PACKAGE} {compiled.VERSION}"


def index_of(compiled: Compiled | None, per_replica: int = MAX_BLOCKS_PER_REPLICA, total: int = MAX_BLOCKS) -> ResidencyIndex:
    """An empty residency index; see `ResidencyIndex` for the bounds."""
    if compiled is None:
        return ResidencyIndex(per_replica, total)
    return compiled.ResidencyIndex(per_replica, total, Knowledge.UNKNOWN)
