"""Decides what becomes of each request, by stages: who asks, what for, when it goes on, in how many tokens, and where to."""

import time
from collections.abc import Mapping

from penstock.api import headers
from penstock.gateway.extproc.at_once import AtOnce
from penstock.gateway.extproc.body import MAX_BODY_BYTES, parse_body, too_large
from penstock.gateway.extproc.call import Answered, Call, Refused, ResponseHead, Routed
from penstock.gateway.extproc.failures import Failure, FailureLog
from penstock.gateway.extproc.passage import Passage
from penstock.gateway.extproc.stages.admit import Admit
from penstock.gateway.extproc.stages.identify import Identify
from penstock.gateway.extproc.stages.listing import MODELS_PATH, Listing
from penstock.gateway.extproc.stages.meter import Meter, priority_of
from penstock.gateway.extproc.stages.pick import Pick
from penstock.gateway.extproc.stages.resolve import Resolve
from penstock.gateway.extproc.stages.respond import Respond
from penstock.gateway.extproc.stages.tokenise import Tokenise
from penstock.gateway.extproc.underway import Underway
from penstock.gateway.http.metrics import PickerMetrics
from penstock.prompt.processor import PROMPT_PATHS

_DIGITS = 20
"""More digits than any length has."""
_METHODS = dict.fromkeys(PROMPT_PATHS, "POST") | {MODELS_PATH: "GET"}


class PickDirector:
    """See `penstock.gateway.extproc.exchange.Director`. Each argument is a stage, and `at_once` several of them."""

    def __init__(
        self,
        *,
        identify: Identify,
        resolve: Resolve,
        listing: Listing,
        meter: Meter,
        admit: Admit,
        tokenise: Tokenise,
        pick: Pick,
        respond: Respond,
        underway: Underway,
        metrics: PickerMetrics,
        failures: FailureLog,
        at_once: AtOnce | None = None,
    ) -> None:
        self._failures = failures
        self._identify = identify
        self._resolve = resolve
        self._listing = listing
        self._meter = meter
        self._admit = admit
        self._tokenise = tokenise
        self._pick = pick
        self._respond = respond
        self._underway = underway
        self._metrics = metrics
        self.usual_heads = respond.usual_heads(underway, time.monotonic)
        self.at_once = None if at_once is None else at_once.route

    def preview(self, call: Call) -> None:
        """Refuses paths that do not exist, and bodies that cannot be read, before the bodies have come."""
        path = call.path
        method = _METHODS.get(path) or ("GET" if self._listing.answers(path) else None)
        if method is None:
            message = f"{path} does not exist here; there are {', '.join(_METHODS)}"
            raise Refused(404, message, "unknown_path")
        allowed = ("GET", "HEAD") if method == "GET" else (method,)
        if call.method not in allowed:
            message = f"{path} takes {method}, not {call.method}"
            raise Refused(405, message, "method_not_allowed", sets=[("allow", ", ".join(allowed))])
        self._identify.tenant(call)
        encoding = call.headers.get("content-encoding")
        if encoding and encoding.lower() != "identity":
            message = f"content-encoding {encoding} is not supported: send the body as it is"
            sets = [("accept-encoding", "identity")]
            raise Refused(415, message, "unsupported_encoding", param="content-encoding", sets=sets)
        length = call.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and len(length) < _DIGITS and int(length) > MAX_BODY_BYTES:
            raise too_large()

    async def route(self, call: Call) -> Routed | Answered:
        """Choose the destination of a complete request."""
        passage = Passage(call, time.monotonic())
        try:
            self._identify.run(passage)
            if passage.path not in PROMPT_PATHS and self._listing.answers(passage.path):
                return self._listing.run(call, passage.tenant)
            passage.body, passage.guess = parse_body(call.body), self._tokenise.guess(call.body)
            try:
                self._resolve.run(passage)
            except Refused as refused:
                await self._resolve.anew(passage, refused)
            passage.priority = priority_of(passage)
            return await self._serve(passage)
        except Refused as refused:
            if passage.resolved:
                self._metrics.answered(passage.model.id, str(refused.status))
                refused.model = passage.model.id
            refused.tenant = passage.tenant.name if passage.identified else None
            raise

    async def _serve(self, passage: Passage) -> Routed:
        """Route the request and charge its tenant."""
        bill = self._meter.open(passage)
        try:
            routed = await self._pass_on(passage)
        except BaseException:
            self._meter.void(bill)
            raise
        self._meter.routed(bill, passage, routed.booking)
        return routed

    async def _pass_on(self, passage: Passage) -> Routed:
        while True:
            if not self._admit.at_once(passage):
                await self._admit.run(passage)
            routed = None
            try:
                if not self._tokenise.at_once(passage):
                    await self._tokenise.run(passage)
                routed = self._pick.run(passage)
            finally:
                self._admit.leave(passage, in_vain=routed is None)
            if routed is not None:
                return routed

    def responded(self, routed: Routed, head: ResponseHead) -> list[tuple[str, str]]:
        """Takes in the head of the response; returns headers to add to it."""
        return self._respond.run(routed, head)

    def returned(self, noted: Mapping[str, str], head: ResponseHead) -> list[tuple[str, str]]:
        """As `responded`, for an exchange that saw only the response."""
        name = noted[headers.BOOKING]
        routed = self._underway.responded(name)
        if routed is None:
            return self._respond.strange(noted, head, counted=self._underway.counted(name))
        return self._respond.run(routed, head)

    def passed_on(self, routed: Routed) -> None:
        """The exchange is over, and the request has gone to its replica; `returned` will show the response."""
        self._underway.passed_on(routed)

    def ended(self, routed: Routed) -> None:
        """The whole response has passed: only gateways that send response bodies show that."""
        self._respond.ended(routed)

    def closed(self, routed: Routed) -> None:
        """The exchange is over."""
        self._respond.closed(routed)

    def refused(self, call: Call, refused: Refused) -> None:
        """Record that the request was answered with an error, by the gateway or the director."""
        self._metrics.refusals.labels(reason=refused.reason).inc()
        self._failures.add(
            Failure(
                time=time.time(),
                request_id=call.headers.get(headers.REQUEST_ID, ""),
                model=refused.model,
                tenant=refused.tenant or None,
                status=refused.status,
                reason=refused.reason,
                message=str(refused),
            )
        )
