"""Why a source's files cannot be had, in one word for machines and one sentence for people."""

import os
from typing import Final, Literal

Reason = Literal[
    "InvalidSource", "Unauthorized", "Forbidden", "NotFound", "NoSpace", "NotWritable", "ChecksumMismatch", "Unreachable"
]

PERMANENT: Final = ("InvalidSource", "Unauthorized", "Forbidden", "NotFound", "NoSpace", "NotWritable")
"""What another try at once would not change."""
SECRETS: Final = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
"""Environment variables whose values no message may hold."""


class SourceError(Exception):
    """The files of a source cannot be had; the message names the source and never a credential."""

    def __init__(self, reason: Reason, message: str) -> None:
        for name in SECRETS:
            if value := os.environ.get(name):
                message = message.replace(value, f"[{name}]")
        super().__init__(" ".join(message.split()))  # one line: people and conditions are told the last line
        self.reason: Final = reason


def refused(uri: str, status: int, what: str, hint: str) -> SourceError:
    """The error for an HTTP status with which a server refused.

    Args:
        what: What was asked for, beside the source itself; may be empty.
        hint: Which credentials count there.
    """
    asked = f"{uri}{f' {what}' if what else ''}"
    if status == 401:
        return SourceError("Unauthorized", f"{asked}: 401, the server wants other credentials or hides it; {hint}")
    if status == 403:
        return SourceError("Forbidden", f"{asked}: 403, these credentials may not read it; {hint}")
    if status == 404:
        return SourceError("NotFound", f"{asked}: 404, there is no such thing; look at name, revision and credentials")
    return SourceError("Unreachable", f"{asked}: the server answered {status}")
