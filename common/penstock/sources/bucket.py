"""`s3://BUCKET/PATH`: S3 and what speaks its protocol, by obstore.

Credentials and place are the AWS variables: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`,
`AWS_ENDPOINT_URL`, `AWS_SKIP_SIGNATURE=true` for public buckets; or the pod's own role.
"""

import hashlib
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.sources.errors import SourceError, refused
from penstock.sources.listing import Listing, RemoteFile, wanted

if TYPE_CHECKING:
    from obstore.store import S3Store

T = TypeVar("T")

_HINT = "look at AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and at what they may list and read"
_MD5: Final = re.compile(r'^"?([0-9a-f]{32})"?$')
_TIMEOUT_S: Final = 60


class Bucket:
    """The objects below a path of a bucket."""

    def __init__(self, uri: str) -> None:
        """Raises SourceError where this names no bucket and path."""
        self.uri = uri
        self.bucket, _, path = uri.removeprefix("s3://").partition("/")
        self.prefix = path.strip("/")
        if not self.bucket or not self.prefix:
            raise SourceError("InvalidSource", f"{uri!r}: expected s3://bucket/path")

    def folder(self, version: str) -> str:
        return f"s3--{self.bucket}--{self.prefix.replace('/', '--')}--{version}"

    def resolve(self) -> Listing:
        import obstore

        found = self._asked("", lambda: obstore.list(self._store, prefix=self.prefix).collect())
        files = wanted(self.uri, [self._file(it) for it in found if it["path"].startswith(f"{self.prefix}/")])
        # A bucket has no commits: the same names, sizes and ETags are the same version.
        content = "\n".join(f"{it.path}\t{it.size}\t{it.version}" for it in files)
        return Listing(hashlib.sha256(content.encode()).hexdigest()[:16], files)

    def read(self, listing: Listing, file: RemoteFile, start: int, size: int) -> bytes:
        import obstore

        options: Any = {"range": (start, start + size), "if_match": file.version or None}
        return self._asked(
            file.path, lambda: bytes(obstore.get(self._store, f"{self.prefix}/{file.path}", options=options).bytes())
        )

    def vouches(self, file: RemoteFile) -> bool:
        """An ETag is no digest of the content where the object is encrypted with a key of KMS or of the client."""
        import obstore

        url = self._asked(file.path, lambda: obstore.sign(self._store, "HEAD", f"{self.prefix}/{file.path}", _AN_HOUR))
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_TIMEOUT_S) as answer:
                encrypted = answer.headers.get("x-amz-server-side-encryption", "")
                by_client = "x-amz-server-side-encryption-customer-algorithm" in answer.headers
        except urllib.error.HTTPError as error:
            raise refused(self.uri, error.code, file.path, _HINT) from None
        except OSError as error:
            raise SourceError("Unreachable", f"{self.uri} {file.path}: {type(error).__name__}") from None
        return not by_client and encrypted in ("", "AES256")

    @cached_property
    def _store(self) -> "S3Store":
        from obstore.store import S3Store

        plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
        return S3Store(
            self.bucket,
            client_options={"allow_http": plain, "timeout": timedelta(seconds=_TIMEOUT_S)},
            retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=30)},  # the caller tries again too
        )

    def _file(self, found: Any) -> RemoteFile:
        etag = found["e_tag"] or ""
        md5 = _MD5.match(etag)  # of an object that came in parts it is no digest of the content
        path = found["path"].removeprefix(f"{self.prefix}/")
        return RemoteFile(path, found["size"], f"md5:{md5[1]}" if md5 else None, etag)

    def _asked(self, what: str, ask: Callable[[], T]) -> T:
        from obstore import exceptions

        try:
            return ask()
        except exceptions.UnauthenticatedError as error:
            raise refused(self.uri, 401, what, _HINT) from error
        except exceptions.PermissionDeniedError as error:
            raise refused(self.uri, 403, what, _HINT) from error
        except (exceptions.NotFoundError, FileNotFoundError) as error:
            raise refused(self.uri, 404, what, _HINT) from error
        except exceptions.PreconditionError as error:
            raise SourceError("ChecksumMismatch", f"{self.uri} {what}: it was changed during the download") from error
        except exceptions.BaseError as error:
            message = str(error).strip().splitlines()[0]
            status = re.search(
                r"status(?: code)?:? (401|403|404)\b|\b(401|403|404) (?:Unauthorized|Forbidden|Not Found)", message
            )
            if status:
                raise refused(self.uri, int(status[1] or status[2]), what, _HINT) from error
            raise SourceError("Unreachable", f"{self.uri} {what}: {message}") from error


_AN_HOUR: Final = timedelta(hours=1)
