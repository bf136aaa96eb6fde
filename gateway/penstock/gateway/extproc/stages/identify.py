"""The first stage: the request's id, and its tenant by its API key."""

import uuid

from penstock.api import headers
from penstock.gateway.extproc.call import Call, Refused
from penstock.gateway.extproc.passage import Passage
from penstock.gateway.tenants.registry import Registry
from penstock.gateway.tenants.tenant import NOBODY, Tenant

BEARER = "bearer "
CHALLENGE = (("www-authenticate", "Bearer"),)
"""What a 401 has to say (RFC 9110)."""


class Identify:
    """Finds the request's id and its tenant.

    Args:
        registry: The tenants. None: the gateway does not tell clients apart.
    """

    def __init__(self, registry: Registry | None = None) -> None:
        self._registry = registry

    def run(self, passage: Passage) -> None:
        """Names the request and its tenant; raises `Refused` with 401."""
        passage.request_id = passage.call.headers.get(headers.REQUEST_ID) or uuid.uuid4().hex
        passage.tenant = self.tenant(passage.call)
        passage.identified = True
        passage.conceals = self._registry is not None and not self._registry.pass_keys

    def tenant(self, call: Call) -> Tenant:
        """Return the tenant of a request.

        Raises:
            Refused: with 401, for an unknown key or a missing one.
        """
        registry = self._registry
        if registry is None:
            return NOBODY
        key = _key(call)
        if key is None:
            if registry.anonymous is not None:
                return registry.anonymous
            message = "no API key was given: send it as `Authorization: Bearer KEY`"
            raise Refused(401, message, "missing_api_key", code="invalid_api_key", sets=CHALLENGE)
        tenant = registry.find(key)
        if tenant is None:
            raise Refused(401, "the API key is not one that is known here", "invalid_api_key", sets=CHALLENGE)
        return tenant


def _key(call: Call) -> str | None:
    """The client's key, from whichever header it came in; None where it came in none."""
    given = call.headers.get("authorization", "")
    if given[: len(BEARER)].lower() == BEARER and (key := given[len(BEARER) :].strip()):
        return key
    return next((key for name in headers.API_KEYS if (key := call.headers.get(name))), None)
