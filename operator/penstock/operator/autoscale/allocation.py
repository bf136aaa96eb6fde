"""Distribute a demand over pools, within what they may cost together. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

EPSILON = 1e-9


@dataclass(frozen=True)
class Offer:
    """A pool that can carry a share of a demand."""

    name: str
    unit: float
    """What one of its replicas carries, in the unit of the demand."""
    cost: float
    """Cost of a replica."""
    least: int
    most: int

    @property
    def price(self) -> float:
        """Cost of one unit of the demand in this pool."""
        return self.cost / self.unit


def allocate(demand: float, offers: Sequence[Offer]) -> dict[str, int]:
    """How many replicas each pool has: its least, then the cheapest for what they carry are filled first. What grows last is
    the dearest, and it shrinks first. Never less for more demand."""
    sizes = {offer.name: offer.least for offer in offers}
    left = demand - sum(offer.least * offer.unit for offer in offers)
    for offer in sorted(offers, key=lambda offer: (offer.price, offer.name)):
        if left <= EPSILON:
            break
        more = min(max(offer.most - offer.least, 0), math.ceil(left / offer.unit - EPSILON))
        sizes[offer.name] += more
        left -= more * offer.unit
    return sizes


@dataclass(frozen=True)
class Member:
    """A pool that shares a budget."""

    name: str
    group: str
    """Pools of one group carry the same demand."""
    offer: Offer
    wanted: int
    current: int


def afford(members: Sequence[Member], budget: float) -> dict[str, int]:
    """The sizes that the budget allows, at most what is wanted and at least each pool's least.

    Replicas are given up one by one: those that do not exist yet before those that do; then of the group that comes closest to
    what it wants, so that prefill and decode shrink in proportion; then the dearest for what it carries.
    """
    sizes = {member.name: member.wanted for member in members}

    def spent() -> float:
        return sum(sizes[member.name] * member.offer.cost for member in members)

    def satisfied(group: str) -> float:
        its = [member for member in members if member.group == group]
        wanted = sum(member.wanted * member.offer.unit for member in its)
        return sum(sizes[member.name] * member.offer.unit for member in its) / wanted if wanted else 0.0

    while spent() > budget + EPSILON:
        can = [member for member in members if sizes[member.name] > member.offer.least]
        if not can:
            break  # the user's minima cost more than the user's budget
        victim = max(can, key=lambda it: (sizes[it.name] > it.current, satisfied(it.group), it.offer.price, it.name))
        sizes[victim.name] -= 1
    return sizes


def balance(prefill: Sequence[Member], decode: Sequence[Member], bounds: tuple[float, float]) -> dict[str, int]:
    """Sizes at which the quotient of prefill to decode replicas is within bounds: the side that is short gets more, within its
    pools' limits; nothing is taken away. With no replica on a side nothing is asked of the other."""
    low, high = bounds
    sizes = {member.name: member.wanted for member in (*prefill, *decode)}
    prefills, decodes = (sum(member.wanted for member in side) for side in (prefill, decode))
    if not prefills or not decodes:
        return sizes
    if prefills < low * decodes:
        return sizes | _raise(prefill, math.ceil(low * decodes - EPSILON))
    if prefills > high * decodes:
        return sizes | _raise(decode, math.ceil(prefills / high - EPSILON))
    return sizes


def _raise(side: Sequence[Member], count: int) -> dict[str, int]:
    """Size the pools for at least `count` replicas in all, the cheapest first. Counts replicas and ignores what each can
    carry."""
    offers = [replace(member.offer, unit=1.0, least=member.wanted, most=max(member.offer.most, member.wanted)) for member in side]
    return allocate(float(count), offers)


def units(speeds: Mapping[str, float]) -> dict[str, float]:
    """Return the capacity of a replica of each pool relative to the strongest. A pool without measurements gets the average of
    the others."""
    learned = [speed for speed in speeds.values() if speed > 0]
    if not learned:
        return dict.fromkeys(speeds, 1.0)
    strongest, usual = max(learned), sum(learned) / len(learned)
    return {name: (speed or usual) / strongest for name, speed in speeds.items()}
