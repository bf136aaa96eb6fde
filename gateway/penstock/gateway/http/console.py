"""The console: one page that shows what `/pools` and `/debug/*` say. It changes nothing."""

import base64
import hashlib
import re
from pathlib import Path

from aiohttp import web


def console_routes() -> list[web.RouteDef]:
    """The page at `/console`, to which `/` leads."""
    page = Path(__file__).with_name("console.html").read_bytes()
    policy = {"content-security-policy": _policy(page), "referrer-policy": "no-referrer", "x-content-type-options": "nosniff"}

    async def console(request: web.Request) -> web.Response:
        return web.Response(body=page, content_type="text/html", charset="utf-8", headers={**policy, "cache-control": "no-cache"})

    async def root(request: web.Request) -> web.Response:
        raise web.HTTPFound("/console")

    return [web.get("/", root), web.get("/console", console)]


def _policy(page: bytes) -> str:
    """Return a content security policy that allows only the page's own script and style, and requests to this gateway only."""
    hashes = {
        kind: " ".join(f"'sha256-{_digest(text)}'" for text in re.findall(rb"<%s>(.*?)</%s>" % (kind, kind), page, re.DOTALL))
        for kind in (b"script", b"style")
    }
    return (
        f"default-src 'none'; connect-src 'self'; img-src data:; script-src {hashes[b'script']}; style-src {hashes[b'style']}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _digest(text: bytes) -> str:
    return base64.b64encode(hashlib.sha256(text).digest()).decode()
