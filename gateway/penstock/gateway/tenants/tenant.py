"""Tenants, and what each may do."""

from fnmatch import fnmatchcase
from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1, le=10**15)]
MOST_PRIORITY = 1_000


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Limits of a tenant. None: the common limit."""

    priority: Annotated[int, msgspec.Meta(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] = 0
    """Smaller goes first, at the gateway and in engines that serve by priority. Requests may ask for less, never for more."""
    weight: Annotated[float, msgspec.Meta(gt=0, le=1_000_000)] = 1.0
    """Share in comparison with the others of the same priority, in tokens."""
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    """Prompt and output tokens."""
    max_concurrent: Count | None = None
    """Requests at the replicas at one time; those that wait at the gateway included."""
    max_queued: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Requests that may wait at the gateway at one time."""
    models: list[str] | None = None
    """Names that may be used; `*` stands for any text. None: all."""

    def may_use(self, name: str) -> bool:
        """Whether `name` is one of the models."""
        return self.models is None or any(fnmatchcase(name, pattern) for pattern in self.models)


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A client, or a group of clients, whose requests are accounted together."""

    name: str
    """Name in engines, metrics and logs. Empty if the gateway does not tell clients apart."""
    limits: Limits = Limits()


NOBODY = Tenant(name="")
"""The tenant of all requests if there is no tenants file."""
