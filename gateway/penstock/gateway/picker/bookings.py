"""Bookings: requests that were sent to a replica, so that picks made since its last report count.

A booking is *pending* from the pick to the response headers, then *unreported* until a report that includes it, then *running*
until its end. Only pending and unreported work is added to what a replica reports, so that the lost end of a running request
distorts no estimate.
"""

import enum
from collections import Counter, defaultdict
from collections.abc import Callable

from penstock.gateway.picker.candidates import Booked, ReplicaKey
from penstock.gateway.picker.compiled import Compiled

EXPIRY_S = 3600.0
"""Longer than any answer. A booking that expires is an end that was never reported."""


class State(enum.StrEnum):
    """State of a booking. Strings, since those are hashed without a call."""

    PENDING = "pending"
    UNREPORTED = "unreported"
    RUNNING = "running"
    RELEASED = "released"


_NONE = dict.fromkeys(State, 0)


def bookings_of(
    compiled: Compiled | None, changed: Callable[[ReplicaKey, Booked], None], left: Callable[[ReplicaKey], None]
) -> "Bookings":
    """Empty bookings. Compiled ones ask nobody what changes: `Places.lay_out` tells them where the figures are."""
    if compiled is None:
        return Bookings(changed, left)
    return compiled.Bookings(tuple(State), Booked, Counter(), EXPIRY_S)


class Booking:
    """One request at one replica."""

    __slots__ = ("awaited", "key", "left", "made_at", "prefill_tokens", "request_id", "responded_at", "state", "transfer_tokens")

    def __init__(
        self, request_id: str, key: ReplicaKey, prefill_tokens: int, made_at: float, transfer_tokens: int = 0, left: int = 1
    ) -> None:
        self.left = left
        """Answers that the engine has not ended: one for each that the client wants of each prompt."""
        self.request_id = request_id
        self.key = key
        self.prefill_tokens = prefill_tokens
        self.transfer_tokens = transfer_tokens
        self.made_at = made_at
        self.state = State.PENDING
        self.awaited: tuple[int, int] | None = None
        """(epoch, seq) of the report that includes this request; None where its response carried no report."""
        self.responded_at: float | None = None

    @property
    def unanswered(self) -> bool:
        """Whether the booking counts and the head of its response has not come."""
        return self.responded_at is None and self.state is not State.RELEASED


class _Account:
    """The bookings of one replica."""

    def __init__(self) -> None:
        self.bookings: dict[str, list[Booking]] = {}
        self.counts = _NONE.copy()
        self.unreported: set[Booking] = set()
        self.answers = self.prefill_tokens = self.transfer_tokens = 0  # of pending and unreported bookings
        self.outstanding = Booked()

    def mark(self, booking: Booking, sign: int) -> None:
        """One more booking in its state, or one less."""
        self.counts[booking.state] += sign
        if booking.state is State.UNREPORTED:
            (self.unreported.add if sign > 0 else self.unreported.discard)(booking)


class Bookings:
    """All bookings of a gateway process. Time is an argument (monotonic seconds).

    Args:
        changed: Called with the outstanding work at a replica whenever it changes.
        left: Called with a replica when a request that its last report includes has ended.
    """

    def __init__(
        self,
        changed: Callable[[ReplicaKey, Booked], None] = lambda key, booked: None,
        left: Callable[[ReplicaKey], None] = lambda key: None,
    ) -> None:
        self._changed = changed
        self._left = left
        self._accounts: defaultdict[ReplicaKey, _Account] = defaultdict(_Account)
        self.released: Counter[str] = Counter()
        """How many bookings each cause has ended."""
        self.ended: list[Callable[[Booking, str], None]] = []
        """Called with each ended booking and the cause."""
        self.moved: list[Callable[[Booking], None]] = []
        """Called with each booking that followed its request to another replica."""

    def book(
        self, request_id: str, key: ReplicaKey, prefill_tokens: int, now: float, *, transfer_tokens: int = 0, answers: int = 1
    ) -> Booking:
        """A pending booking at `key` of the tokens that are not resident: those to compute there, and those whose KV blocks come
        from a prefill replica. The engine counts each of its `answers` as a request, and tells the end of each."""
        booking = Booking(request_id, key, prefill_tokens, now, transfer_tokens, answers)
        self._open(booking)
        return booking

    def outstanding(self, key: ReplicaKey) -> Booked:
        """What the reports of `key` do not include yet."""
        account = self._accounts.get(key)
        if account is None:
            return Booked()
        return account.outstanding

    def count(self, key: ReplicaKey, *states: State) -> int:
        """Open bookings of `key` in `states`; in any where none is given."""
        account = self._accounts.get(key)
        if account is None:
            return 0
        return sum(account.counts[state] for state in states) if states else sum(account.counts.values())

    def total(self, state: State) -> int:
        """Open bookings of all replicas in `state`."""
        return sum(account.counts[state] for account in self._accounts.values())

    def move(self, booking: Booking, key: ReplicaKey) -> None:
        """Move a booking to the replica that took the request instead of the picked one."""
        if booking.state is State.RELEASED or booking.key == key:
            return
        self._close(booking)
        booking.key = key
        self._open(booking)
        for told in self.moved:
            told(booking)

    def responded(self, booking: Booking, report: tuple[int, int] | None, now: float) -> None:
        """Response headers have come, with the load report (epoch, seq) or with none."""
        if booking.state is State.PENDING:
            booking.awaited, booking.responded_at = report, now
            self._set(booking, State.UNREPORTED)

    def reported(self, key: ReplicaKey, epoch: int, seq: int, asked_at: float) -> None:
        """A load report of `key` was received.

        Args:
            key: The replica.
            epoch: The report's.
            seq: The report's.
            asked_at: When it was asked for (a poll) or received (a push): it includes all that was answered before.
        """
        account = self._accounts.get(key)
        if account is None or not account.unreported:
            return
        for booking in [b for b in account.unreported if _includes(b, epoch, seq, asked_at)]:
            self._set(booking, State.RUNNING)

    def included(self, booking: Booking) -> None:
        """Record that a report which came long after the pick includes the request, if the replica has it at all."""
        if booking.state is State.PENDING:
            self._set(booking, State.RUNNING)

    def release(self, booking: Booking, by: str) -> None:
        """End a booking, unless it has ended already. `by` labels the metric."""
        if booking.state is State.RELEASED:
            return
        self._close(booking)
        if booking.state is State.RUNNING:
            self._left(booking.key)
        booking.state = State.RELEASED
        self.released[by] += 1
        for told in self.ended:
            told(booking, by)

    def finished(self, key: ReplicaKey, request_id: str) -> bool:
        """Record a replica's report that a request, or one of several answers to it, has ended; return whether it was booked."""
        account = self._accounts.get(key)
        same = account.bookings.get(request_id) if account else None
        if not account or not same:
            return False
        booking = same[0]  # of several with one id, the oldest
        if booking.left <= 1:
            self.release(booking, "finished")
            return True
        self._count(account, booking, -1)
        booking.left -= 1
        self._count(account, booking, 1)
        if booking.state is State.RUNNING:
            self._left(key)
        return True

    def release_all(self, key: ReplicaKey, by: str) -> None:
        """Ends all bookings of a replica that is gone or has restarted."""
        account = self._accounts.get(key)
        for booking in [b for same in account.bookings.values() for b in same] if account else []:
            self.release(booking, by)

    def expire(self, now: float) -> None:
        """Ends the bookings that nothing else has ended."""
        for account in list(self._accounts.values()):
            for booking in [b for same in account.bookings.values() for b in same if now - b.made_at >= EXPIRY_S]:
                self.release(booking, "expired")

    def _open(self, booking: Booking) -> None:
        account = self._accounts[booking.key]
        account.bookings.setdefault(booking.request_id, []).append(booking)
        self._count(account, booking, 1)

    def _close(self, booking: Booking) -> None:
        account = self._accounts[booking.key]
        self._count(account, booking, -1)
        same = account.bookings[booking.request_id]
        same.remove(booking)
        if not same:
            del account.bookings[booking.request_id]
        if not account.bookings:
            del self._accounts[booking.key]

    def _set(self, booking: Booking, state: State) -> None:
        """Between states whose work is not reported nothing changes for picks."""
        account = self._accounts[booking.key]
        if state is State.RUNNING:
            self._count(account, booking, -1)
            booking.state = state
            self._count(account, booking, 1)
        else:
            account.mark(booking, -1)
            booking.state = state
            account.mark(booking, 1)

    def _count(self, account: _Account, booking: Booking, sign: int) -> None:
        account.mark(booking, sign)
        if booking.state is not State.RUNNING:
            account.answers += sign * booking.left
            account.prefill_tokens += sign * booking.prefill_tokens
            account.transfer_tokens += sign * booking.transfer_tokens
            account.outstanding = Booked(account.answers, account.prefill_tokens, account.transfer_tokens)
            self._changed(booking.key, account.outstanding)


def _includes(booking: Booking, epoch: int, seq: int, asked_at: float) -> bool:
    if booking.awaited is not None:
        return (epoch, seq) >= booking.awaited
    return booking.responded_at is not None and asked_at > booking.responded_at
