"""Cross-origin resource sharing: which web pages may call the API (https://fetch.spec.whatwg.org/#http-cors-protocol).

Browsers send a page's request with its origin, and show the page the answer only if that allows the origin. Before requests with
a
JSON body or a key they send a preflight: an OPTIONS request without a key.
"""

from collections.abc import Sequence
from typing import Final

from aiohttp import hdrs, web

from penstock.api.headers import REQUEST_ID
from penstock.engine.frontend.errors import ApiError

ANY: Final = "*"
_METHODS: Final = "GET, HEAD, POST"
_REMEMBER_S: Final = "600"


class Cors:
    """Lets pages of some origins ask.

    Args:
        origins: `scheme://host[:port]` of each, or `*` for all; none: no page may.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a browser's question, `ApiError` 403 where it is no; None for any other request."""
        asks = request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if not asks or not self._origins:
            return None
        if not self._allows(request):
            raise ApiError(403, "pages of this origin may not ask here (--allowed-origins)", param="origin")
        headers = {hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS, hdrs.ACCESS_CONTROL_MAX_AGE: _REMEMBER_S}
        if (asked := request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS)) is not None:
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = asked
        return web.Response(status=204, headers=headers)

    def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """What has a browser show the answer to the page."""
        if not self._origins:
            return
        if ANY not in self._origins:
            response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if self._allows(request):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = ANY if ANY in self._origins else request.headers[hdrs.ORIGIN]
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = REQUEST_ID

    def _allows(self, request: web.Request) -> bool:
        origin = request.headers.get(hdrs.ORIGIN)
        return origin is not None and (ANY in self._origins or origin in self._origins)
