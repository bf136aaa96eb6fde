"""Our picker with what the extension's gateway conformance tests ask of theirs: it stands in for the image `lwepp`.

The tests judge gateways. Their requests have paths of no API and a header that names the pods to pick, and they expect the picker
to say in a response header who the gateway says has answered. Here these requests become completions with a subset hint; all else
is `penstock gateway` as it is. The flags are lwepp's.
"""

import argparse
import sys
from typing import Any

import msgspec

from penstock.gateway import process
from penstock.gateway.cli import gateway
from penstock.gateway.extproc import exchange
from penstock.gateway.extproc.call import Answered, Call, ResponseHead, Routed
from penstock.gateway.extproc.director import PickDirector
from penstock.gateway.picker.subset import parse_subset

WANTED = "test-epp-endpoint-selection"
SERVED = "x-conformance-test-served-endpoint"
_COMPLETION = {":method": "POST", ":path": "/v1/completions"}
_BODY = b'{"model": "conformance-fake-model", "prompt": "none"}'


class SuitePicker(PickDirector):
    """See the module."""

    def preview(self, call: Call) -> None:
        super().preview(as_completion(call))

    async def route(self, call: Call) -> Routed | Answered:
        return await super().route(as_completion(call))

    def responded(self, routed: Routed, head: ResponseHead) -> list[tuple[str, str]]:
        return [*super().responded(routed, head), (SERVED, head.served or "the gateway does not say")]


def as_completion(call: Call) -> Call:
    """A request of the suite as one of OpenAI's API; what the gateway passes on is the client's own."""
    wanted = call.headers.get(WANTED)
    subset = call.subset if wanted is None else parse_subset(wanted)
    return msgspec.structs.replace(call, headers=call.headers | _COMPLETION, body=call.body or _BODY, subset=subset)


def main(argv: list[str]) -> int:
    """Serves one pool until it is told to end."""
    parser = argparse.ArgumentParser()
    for flag in ("--pool-name", "--pool-namespace", "--grpc-port", "--grpc-health-port", "--zap-encoder"):
        parser.add_argument(flag)
    given = parser.parse_args(argv)
    patched: Any = (process, exchange)
    patched[0].PickDirector = SuitePicker
    patched[1].READ = exchange.READ | {WANTED}
    pool = f"{given.pool_namespace}/{given.pool_name}={given.grpc_port}"
    flags = [f"--namespace={given.pool_namespace}", f"--pool-port={pool}", f"--health-port={given.grpc_health_port}"]
    return gateway([*flags, "--host=0.0.0.0", "--grpc-port=9001", "--http-port=9090", "--pool-tls-self-signed"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
