"""What a replica answers to a question of ours: read up to a bound, and never trusted to be what was asked for."""

from typing import Final

import aiohttp

UNREADABLE: Final = (aiohttp.ClientError, ValueError, ArithmeticError, RecursionError)
"""Exceptions that reading an unreadable answer can raise: broken text, numbers out of range, lists nested too deeply."""


async def body_of(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The whole body; raises `ValueError` where it has more than `limit` bytes, which are not read."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit:
            raise ValueError(f"an answer of more than {limit} bytes")
    return bytes(body)
