"""`kv_transfer_params`, in the shape that vLLM and llm-d's sidecars have given it.

The lender signs them. So nobody can make a replica connect to an address that no other replica has named.
"""

import hashlib
import hmac
from typing import Any, Final

import msgspec

from penstock.api.kv_pairs import alike
from penstock.engine.config import ParallelConfig, TransferConfig
from penstock.engine.connectors.transfer.secret_file import read_secret
from penstock.engine.frontend.errors import ApiError
from penstock.engine.messages import TRANSFER_REFUSED, Lent, RemotePrefix
from penstock.plain_errors import explained

FIELD: Final = "kv_transfer_params"
_SIZES: Final = {"pipeline": "pp_size", "tensor": "tp_size"}


class _Remote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a lender answers, and a reader is given."""

    do_remote_prefill: bool
    do_remote_decode: bool
    remote_block_ids: list[list[int]]
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    """Of the first part of pages."""
    remote_hosts: list[str]
    """By part of pages: a replica may be on several nodes."""
    remote_port: int
    remote_num_tokens: int
    remote_fingerprint: str
    tp_size: int
    pp_size: int
    signature: str = ""


class KVTransfer:
    """Reads and writes the field.

    Args:
        config: The replica's.
        parallel: The ranks of its model.
        drafts: Method of speculative decoding; None: there is none.
    """

    def __init__(self, config: TransferConfig, parallel: ParallelConfig, drafts: str | None) -> None:
        self.config = config
        self._parallel, self._drafts = parallel, drafts
        self._secret = read_secret(config.secret)

    def read(self, params: dict[str, Any], *, optional: bool = False) -> RemotePrefix | None:
        """What another replica lends; None: this request is to lend its own pages. `ApiError` 400 names what is wrong.

        Args:
            params: The field.
            optional: Whether the request goes on without pages that do not fit.
        """
        if params.get("do_remote_decode") is True and params.get("do_remote_prefill") in (None, False):
            if not self.config.lends:
                raise _refused(f"do_remote_decode: this engine lends no pages, it is a {self.config.role}")
            return None
        try:
            remote = msgspec.convert(params, _Remote)
        except msgspec.ValidationError as error:
            raise _refused(str(explained(error, _Remote))) from None
        if not remote.do_remote_prefill or remote.do_remote_decode:
            raise _refused("one of do_remote_decode and do_remote_prefill must be true")
        if not self.config.reads:
            raise _refused(f"do_remote_prefill: this engine reads no pages, it is a {self.config.role}")
        if not hmac.compare_digest(remote.signature.encode(), self._signature(remote).encode()):
            raise _refused("signature is not that of a replica with the same secret (--kv-transfer-secret-file)")
        theirs = {"pp_size": remote.pp_size, "tp_size": remote.tp_size}
        for name, size in alike(self._parallel.tensor_parallel_size, self._parallel.pipeline_parallel_size, self._drafts).items():
            if theirs[field := _SIZES[name]] != size:
                raise _refused(f"{field} is {theirs[field]}, and here it is {size}: both must be equal")
        return RemotePrefix(
            lease=remote.remote_request_id,
            engine_id=remote.remote_engine_id,
            hosts=remote.remote_hosts,
            port=remote.remote_port,
            fingerprint=remote.remote_fingerprint,
            num_tokens=remote.remote_num_tokens,
            num_blocks=[len(blocks) for blocks in remote.remote_block_ids],
            optional=optional,
        )

    def params(self, lent: Lent) -> dict[str, Any]:
        """What the reader of lent pages must be given."""
        remote = _Remote(
            do_remote_prefill=True,
            do_remote_decode=False,
            remote_block_ids=lent.blocks,
            remote_engine_id=lent.engine_id,
            remote_request_id=lent.lease,
            remote_host=lent.hosts[0],
            remote_hosts=lent.hosts,
            remote_port=lent.port,
            remote_num_tokens=lent.num_tokens,
            remote_fingerprint=lent.fingerprint,
            tp_size=self._parallel.tensor_parallel_size,
            pp_size=self._parallel.pipeline_parallel_size,
        )
        return msgspec.to_builtins(msgspec.structs.replace(remote, signature=self._signature(remote)))

    def _signature(self, remote: _Remote) -> str:
        signed = msgspec.json.encode(msgspec.structs.replace(remote, signature=""))
        return hmac.new(self._secret, b"params" + signed, hashlib.sha256).hexdigest()


def _refused(message: str) -> ApiError:
    return ApiError(400, f"{FIELD}: {message}", param=FIELD, code=TRANSFER_REFUSED)
