"""`GET /v1/models` and `GET /v1/models/NAME`: what the fleet serves."""

from urllib.parse import unquote

import orjson

from penstock.gateway.extproc.call import Answered, Call
from penstock.gateway.extproc.stages.resolve import Resolve
from penstock.gateway.tenants.tenant import Tenant

MODELS_PATH = "/v1/models"


class Listing:
    """The gateway's own answers about models."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve

    @staticmethod
    def answers(path: str) -> bool:
        """Whether `path` is one of these."""
        return path == MODELS_PATH or path.startswith(f"{MODELS_PATH}/")

    def run(self, call: Call, tenant: Tenant) -> Answered:
        """Return the models that the tenant may use.

        Raises:
            Refused: with 404, for a name that is not served.
        """
        entries = dict(self._resolve.names(call, tenant))
        if call.path == MODELS_PATH:
            return _json({"object": "list", "data": list(entries.values())})
        name = unquote(call.path.removeprefix(f"{MODELS_PATH}/"))
        if name not in entries:
            raise self._resolve.unknown(name, call, tenant)
        return _json(entries[name])


def _json(body: object) -> Answered:
    return Answered(status=200, body=orjson.dumps(body), reason="models")
