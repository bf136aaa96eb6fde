"""Ask replicas directly for their load when the gateways do not know it."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from penstock.api.load_report import LoadReport
from penstock.operator.autoscale.signals import PoolSignals, ReplicaSignal
from penstock.operator.replicas import ReplicaError

logger = logging.getLogger(__name__)

AT_ONCE = 16


class LoadClient(Protocol):
    """What is used of `Replicas`."""

    async def load(self, base: str) -> LoadReport: ...


async def ask_replicas(
    client: LoadClient, endpoints: Mapping[str, str], signals: PoolSignals | None, stale_after_s: float
) -> PoolSignals | None:
    """Complete the signals with the replicas' own `/load` answers. None if neither gateways nor replicas answer.

    Args:
        endpoints: Base URLs of the ready replicas by UID.
        signals: The gateways' signals; None if no gateway answers. Held requests and cordons are then unknown.
        stale_after_s: Reports older than this are requested again.
    """
    if signals is None:
        found = await _ask(client, endpoints)
        if endpoints and not found:
            return None
        return PoolSignals(0, tuple(_alone(uid, found) for uid in endpoints), complete=False)
    heard = {r.uid for r in signals.replicas if r.report_age_s is not None and r.report_age_s <= stale_after_s}
    found = await _ask(client, {uid: url for uid, url in endpoints.items() if uid not in heard})
    filled = [replace(it, report=found[it.uid], report_age_s=0.0) if it.uid in found else it for it in signals.replicas]
    seen = {replica.uid for replica in filled}
    filled += [_alone(uid, found) for uid in endpoints if uid not in seen]
    return replace(signals, replicas=tuple(filled))


def _alone(uid: str, found: Mapping[str, LoadReport]) -> ReplicaSignal:
    """A ready replica that no gateway knows."""
    return ReplicaSignal(uid, True, False, 0, found.get(uid), 0.0 if uid in found else None)


async def _ask(client: LoadClient, endpoints: Mapping[str, str]) -> dict[str, LoadReport]:
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(uid: str, url: str) -> tuple[str, LoadReport] | None:
        async with limit:
            try:
                return uid, await client.load(url)
            except ReplicaError as error:
                logger.warning("autoscaler: replica at %s does not say its load: %s", url, error)
                return None

    answers = await asyncio.gather(*(one(uid, url) for uid, url in endpoints.items()))
    return dict(answer for answer in answers if answer is not None)
