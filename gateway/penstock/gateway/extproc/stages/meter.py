"""What requests cost their tenants: budgets before they are served, accounts while and after."""

import time
from collections import OrderedDict

from prometheus_client import CollectorRegistry, Counter

from penstock.api import metrics
from penstock.api.events import Event, RequestFinished
from penstock.gateway.extproc.call import Refused
from penstock.gateway.extproc.passage import Passage
from penstock.gateway.flow.gate import FlowGate
from penstock.gateway.load.follower import FleetFollower
from penstock.gateway.picker.bookings import Booking
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.tenants.account import Account, OverBudget
from penstock.gateway.tenants.registry import Registry

OUTPUT_COST = 2.0
"""Cost of an output token in the shares of service, where a prompt token costs 1: as in the engine."""
REMEMBERED = 65_536
"""Requests whose outputs are waited for at most; engines without events never tell."""
_WORDS = {
    "max_concurrent": "requests at one time",
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "tokens a minute",
}


class _Bill:
    """One request's."""

    __slots__ = ("account", "band", "booking", "came", "charged", "finishes", "guessed", "model", "tenant", "tokens", "weight")

    def __init__(self, passage: Passage, account: Account | None, tokens: int) -> None:
        self.account = account
        self.tokens = tokens
        self.tenant = passage.tenant.name
        self.weight = passage.tenant.limits.weight
        self.band = 0
        self.model = ""
        self.charged = 0
        self.came = passage.came
        self.booking: Booking | None = None
        self.finishes = 1
        self.guessed = False
        """Whether `tokens` is what its bytes make likely, and its end will tell better."""


class TenantMetrics:
    """Usage by tenant. Names are those of the file alone, so the series are as many as it has tenants."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            metrics.TENANT_REQUESTS, "Requests by tenant and outcome", ["tenant", "outcome"], registry=registry
        )
        self.tokens = Counter(metrics.TENANT_TOKENS, "Tokens by tenant and kind", ["tenant", "kind"], registry=registry)


class Meter:
    """Keeps the tenants' accounts.

    Args:
        registry: The tenants. None: the gateway does not tell clients apart and meters nothing.
        gate: Receives the cost of requests, for the fair shares of waiting ones.
        follower: Its events and bookings say when requests end and what they cost.
        counters: Usage by tenant.
    """

    def __init__(self, registry: Registry | None, gate: FlowGate, follower: FleetFollower, counters: TenantMetrics) -> None:
        self._registry = registry
        self._gate = gate
        self._metrics = counters
        self._open: dict[Booking, _Bill] = {}
        self._unsettled: OrderedDict[_Bill, None] = OrderedDict()
        """Bills with unknown token counts, in the order of arrival."""
        self._same: dict[str, list[_Bill]] = {}
        """The same by request id, which clients may choose: several may have one."""
        if registry is not None:
            follower.listeners.append(self._heard)
            follower.state.bookings.ended.append(self._ended)

    def open(self, passage: Passage) -> _Bill | None:
        """Takes a request into its tenant's account; raises `Refused` with 429 where that has run dry."""
        if self._registry is None:
            return None
        account = self._registry.account(passage.tenant)
        tokens = passage.guess
        if account is not None:
            try:
                account.open(tokens, time.monotonic())
            except OverBudget as over:
                self._metrics.requests.labels(tenant=passage.tenant.name, outcome="over_budget").inc()
                again = f"try again in {over.retry_after_s} s"
                message = f"you may make {over.limit} {_WORDS[over.what]}, and have; {again}"
                code = "rate_limit_exceeded"
                raise Refused(429, message, over.what, code=code, retry_after_s=over.retry_after_s) from None
        return _Bill(passage, account, tokens)

    def void(self, bill: _Bill | None) -> None:
        """The request was not served."""
        if bill is not None:
            if bill.account is not None:
                bill.account.void(bill.tokens, time.monotonic())
            self._metrics.requests.labels(tenant=bill.tenant, outcome="refused").inc()

    def routed(self, bill: _Bill | None, passage: Passage, booking: Booking) -> None:
        """The request has gone to a replica."""
        if bill is None:
            return
        bill.booking, bill.model, bill.charged = booking, passage.model.id, passage.charged
        bill.band = passage.band
        if passage.tokens.unknown is None:
            known = sum(prompt.tokens for prompt in passage.tokens.prompts)
            if bill.account is not None:
                bill.account.spend(known - bill.tokens, time.monotonic())
            bill.tokens = known
        bill.finishes = passage.finishes
        bill.guessed = passage.tokens.unknown is not None and passage.finishes == 1
        self._open[booking] = bill
        self._unsettled[bill] = None
        self._same.setdefault(booking.request_id, []).append(bill)
        if len(self._unsettled) > REMEMBERED:
            self._settled(next(iter(self._unsettled)))
        self._metrics.requests.labels(tenant=bill.tenant, outcome="routed").inc()
        self._metrics.tokens.labels(tenant=bill.tenant, kind="prompt").inc(bill.tokens)

    def _ended(self, booking: Booking, by: str) -> None:
        """The request is at no replica any more. One that was answered with an error has cost no tokens."""
        bill = self._open.pop(booking, None)
        if bill is None:
            return
        now = time.monotonic()
        if bill.account is not None:
            bill.account.close(now - bill.came)
        if by == "error_status" and bill in self._unsettled:
            self._settled(bill)
            if bill.account is not None:
                bill.account.spend(-bill.tokens, now)

    def _settled(self, bill: _Bill) -> None:
        """Close the bill: its token counts are known, or will never be."""
        assert bill.booking is not None
        del self._unsettled[bill]
        same = self._same[bill.booking.request_id]
        same.remove(bill)
        if not same:
            del self._same[bill.booking.request_id]

    def _heard(self, key: ReplicaKey, event: Event) -> None:
        """A replica says what a request has cost."""
        if not isinstance(event, RequestFinished):
            return
        same = self._same.get(event.request_id, ())
        bill = next((it for it in same if it.booking is not None and it.booking.key == key), None)
        if bill is None:
            return
        bill.finishes -= 1
        if bill.finishes <= 0:
            self._settled(bill)
        more = event.prompt_tokens - bill.tokens if bill.guessed and event.prompt_tokens else 0
        if bill.account is not None:
            bill.account.spend(event.output_tokens + more, time.monotonic())
        counted = self._metrics.tokens
        counted.labels(tenant=bill.tenant, kind="prompt").inc(max(more, 0))
        counted.labels(tenant=bill.tenant, kind="output").inc(event.output_tokens)
        counted.labels(tenant=bill.tenant, kind="cached").inc(event.cached_tokens)
        cost = OUTPUT_COST * event.output_tokens
        if bill.charged:  # it waited, and was charged for its bytes: now its prompt is known, and what the cache supplied of it
            cost += event.prompt_tokens - event.cached_tokens - bill.charged
            bill.charged = 0
        self._gate.control.charge(bill.model, bill.band, bill.tenant, cost / bill.weight)


def priority_of(passage: Passage) -> int:
    """Return the request's priority: its tenant's, or a lower one that its body asks for. Without tenants, the body's applies.

    Raises:
        Refused: with 400, if the body asks for a higher one.
    """
    own, asked = passage.tenant.limits.priority, passage.body.fields.get("priority")
    if type(asked) is not int:
        return own
    if passage.tenant.name and asked < own:
        message = f"priority {asked} is more than yours: you may ask for {own} and above (smaller goes first)"
        raise Refused(400, message, "priority_not_allowed", param="priority")
    return asked
