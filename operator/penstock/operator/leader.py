"""Only one operator acts: the holder of a Lease. The others wait, ready to take over.

client-go's protocol; a process that has lost the lease stays, and waits for it again. The election in kubernetes' asyncio client
(37.0.2) cannot create a Lease (its own validation refuses its request) and ends at the first lost connection, so we have our own.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

import aiohttp
from kubernetes.aio.client import ApiException

from penstock.operator.api import Api, said
from penstock.operator.objects import Object

log = logging.getLogger(__name__)


LEASE: Final = "penstock-operator"
# client-go's figures: a crashed leader is replaced after 15 s and a try at the latest.
DURATION_S: Final = 15.0
RENEW_DEADLINE_S: Final = 10.0
RETRY_S: Final = 2.0
GIVE_BACK_S: Final = 3.0
"""How long giving it back may take. With the renewal's deadline less than a lease lasts: one whose API server is silent has
ended before another acts."""
_KIND: Final = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}


class LeadershipLost(RuntimeError):
    """The lease could not be renewed: another operator may act soon, so this one must not."""


class Lease:
    """A candidate's view of the Lease.

    Others' clocks are not trusted: a lease has run out when it did not change for its duration by *our* clock.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        identity: str,
        clock: Callable[[], float] = time.monotonic,
        owner: Callable[[], Awaitable[Object | None]] | None = None,
    ) -> None:
        """
        Args:
            owner: Gives a reference to the object in the namespace that the Lease is to go with.
        """
        self._api = api
        self._owner = owner
        self._namespace = namespace
        self._identity = identity
        self._clock = clock
        self._seen: Object | None = None
        self._seen_at = 0.0

    async def hold(self) -> bool:
        """Takes the lease where it is free, or renews it where it is ours; whether we have it now. Trouble counts as no."""
        try:
            async with asyncio.timeout(RENEW_DEADLINE_S):
                return await self._hold()
        except ApiException as error:
            if error.status != 409:  # 409: another candidate was faster
                log.warning("lease %s/%s: %s", self._namespace, LEASE, said(error))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("lease %s/%s: %r", self._namespace, LEASE, error)
        return False

    async def _hold(self) -> bool:
        lease = await self._api.get("Lease", self._namespace, LEASE)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if lease is None:
            body = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": LEASE, "namespace": self._namespace, **await self._owners()},
            }
            await self._api.create({**body, "spec": self._spec(now, now, 0)})
            return True
        spec: Object = lease.get("spec", {})
        holder = spec.get("holderIdentity") or ""
        if spec != self._seen:
            self._seen, self._seen_at = spec, self._clock()
        age = self._clock() - self._seen_at
        if holder not in ("", self._identity) and age < spec.get("leaseDurationSeconds", DURATION_S):
            return False
        ours = holder == self._identity
        acquired, turns = spec.get("acquireTime", now), spec.get("leaseTransitions", 0)
        wanted = self._spec(acquired, now, turns) if ours else self._spec(now, now, turns + 1)
        metadata = lease["metadata"] if ours else {**lease["metadata"], **await self._owners()}
        await self._api.replace({**lease, **_KIND, "metadata": metadata, "spec": wanted})
        return True

    async def _owners(self) -> Object:
        owner = await self._owner() if self._owner is not None else None
        return {} if owner is None else {"ownerReferences": [owner]}

    def _spec(self, acquired: str, renewed: str, transitions: int) -> Object:
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(DURATION_S),
            "acquireTime": acquired,
            "renewTime": renewed,
            "leaseTransitions": transitions,
        }

    async def release(self) -> None:
        """Gives the lease back if it is ours, so that a standby need not wait until it runs out."""
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                lease = await self._api.get("Lease", self._namespace, LEASE)
                if lease is not None and lease.get("spec", {}).get("holderIdentity") == self._identity:
                    free = {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
                    await self._api.replace({**lease, **_KIND, "spec": free})
        except (ApiException, aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("the lease was not given back, it runs out by itself: %r", error)


async def lead(lease: Lease, act: Callable[[], Awaitable[None]], stop: asyncio.Event, retry_s: float = RETRY_S) -> None:
    """Wait for the lease, act while it is held, and release it at the end.

    Args:
        act: Returns soon after `stop` is set; cancelled when the lease is lost.

    Raises:
        LeadershipLost: the lease could not be renewed in time.
        Exception: what `act` raises.
    """
    while not await lease.hold():
        if await _sleep(stop, retry_s):
            return
    log.info("this operator holds the lease")
    acting = asyncio.ensure_future(act())
    renewing = asyncio.create_task(_renew(lease, retry_s))
    try:
        await asyncio.wait([acting, renewing], return_when=asyncio.FIRST_COMPLETED)
        for task in (acting, renewing):
            if task.done():
                task.result()
    finally:
        for task in (acting, renewing):
            task.cancel()
        await asyncio.gather(acting, renewing, return_exceptions=True)
        await lease.release()


async def _renew(lease: Lease, retry_s: float) -> None:
    renewed = time.monotonic()
    while (left := renewed + RENEW_DEADLINE_S - time.monotonic()) > 0:
        with contextlib.suppress(TimeoutError):  # a server that hangs would answer when the lease is another's
            async with asyncio.timeout(left):
                await asyncio.sleep(retry_s)
                asked = time.monotonic()
                if await lease.hold():
                    renewed = asked
    raise LeadershipLost(f"the lease could not be renewed for {RENEW_DEADLINE_S:.0f} s")


async def _sleep(stop: asyncio.Event, delay_s: float) -> bool:
    """Sleeps, or is woken by `stop`; whether it was."""
    try:
        await asyncio.wait_for(stop.wait(), delay_s)
    except TimeoutError:
        return False
    return True
