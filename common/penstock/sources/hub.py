"""`hf://ORG/NAME`: the Hugging Face Hub, or a mirror of it (`HF_ENDPOINT`). Credentials: `HF_TOKEN`.

huggingface_hub resolves names, commits and access. The bytes are read by range here, because its own download starts a file from
the beginning after a restart.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from penstock.sources.errors import SourceError, refused
from penstock.sources.listing import WANTED, Listing, RemoteFile, wanted

T = TypeVar("T")

_HINT = "set HF_TOKEN to a token of an account that was granted access"
_TIMEOUT_S = 60.0


class Hub:
    """A model of the Hub at a revision."""

    def __init__(self, uri: str, revision: str | None) -> None:
        """
        Args:
            uri: `hf://ORG/NAME`.
            revision: Branch, tag or commit; None: `main`.

        Raises:
            SourceError: It is no name of a model.
        """
        self.uri = uri
        self.repo = uri.removeprefix("hf://").rstrip("/")
        self.revision = revision or "main"
        if self.repo.count("/") != 1:
            raise SourceError("InvalidSource", f"{uri!r}: expected hf://organisation/name")

    def folder(self, version: str) -> str:
        return f"hf--{self.repo.replace('/', '--')}--{version}"

    def resolve(self) -> Listing:
        from huggingface_hub import HfApi

        info = self._asked(
            f"at revision {self.revision}",
            lambda: HfApi().model_info(self.repo, revision=self.revision, files_metadata=True, timeout=_TIMEOUT_S),
        )
        files = [
            RemoteFile(
                path=it.rfilename,
                size=it.size or 0,
                digest=f"sha256:{it.lfs.sha256}" if it.lfs else f"git:{it.blob_id}" if it.blob_id else None,
            )
            for it in info.siblings or []
        ]
        assert info.sha is not None, "the Hub names the commit of every answer"
        return Listing(info.sha, wanted(self.uri, files))

    def read(self, listing: Listing, file: RemoteFile, start: int, size: int) -> bytes:
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        def get() -> bytes:
            headers = {**build_hf_headers(), "Range": f"bytes={start}-{start + size - 1}", "Accept-Encoding": "identity"}
            url = hf_hub_url(self.repo, file.path, revision=listing.version)
            response = get_session().get(url, headers=headers, follow_redirects=True, timeout=_TIMEOUT_S)
            hf_raise_for_status(response)
            # A server without ranges answers 200 with all of it.
            return response.content if response.status_code == 206 else response.content[start : start + size]

        return self._asked(file.path, get)

    def vouches(self, file: RemoteFile) -> bool:
        return True

    def cached(self) -> Path:
        """The model's folder in Hugging Face's own cache, where it is downloaded unless it is there."""
        from huggingface_hub import snapshot_download

        what = f"at revision {self.revision}"
        return Path(self._asked(what, lambda: snapshot_download(self.repo, revision=self.revision, allow_patterns=[*WANTED])))

    def _asked(self, what: str, ask: Callable[[], T]) -> T:
        from httpx2 import HTTPError
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            return ask()
        except HFValidationError as error:
            raise SourceError("InvalidSource", f"{self.uri}: {error}") from error
        except (HTTPError, OSError) as error:
            answered = error if isinstance(error, HfHubHTTPError) else error.__cause__
            if isinstance(answered, HfHubHTTPError):
                raise refused(self.uri, answered.response.status_code, what, _HINT) from error
            raise SourceError("Unreachable", f"{self.uri} {what}: the Hub cannot be reached: {_cause(error)}") from error


def _cause(error: BaseException) -> BaseException:
    """What began it: huggingface_hub says of a connection that fails that a snapshot is not in its cache."""
    return error if error.__cause__ is None else _cause(error.__cause__)
