"""gRPC health, under the names that gateways, charts and kubelets ask for."""

import asyncio

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub  # its methods are made when it is

from penstock.epp_conformance.bench import Bench
from penstock.epp_conformance.check import HEALTH, PRACTICE, Check, Group, Level, check
from penstock.epp_conformance.verdict import Failed, expect

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"


async def _status(bench: Bench, name: str) -> str:
    """Return the health of a service name: a health status, or a gRPC error."""
    channel = await bench.target.health_channel()
    try:
        ask = HealthStub(channel).Check  # pyright: ignore[reportAttributeAccessIssue]
        answer = await ask(HealthCheckRequest(service=name), timeout=bench.target.timeout_s)
        return HealthCheckResponse.ServingStatus.Name(answer.status)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    finally:
        await channel.close()


def _serving(name: str, level: Level, service: str, why: str) -> Check:
    async def run(bench: Bench) -> None:
        status = await _status(bench, service)
        expect(status == "SERVING", f"{service or 'the empty name'} is {status}")

    run.__doc__ = f"Health of {f'`{service}`' if service else 'the empty name'} is SERVING while requests are served{why}."
    return check(name, level, HEALTH)(run)


liveness = _serving("health-liveness", Level.SHOULD, "liveness", "")
readiness = _serving("health-readiness", Level.SHOULD, "readiness", "")
ext_proc = _serving("health-ext-proc", Level.SHOULD, SERVICE, "")
empty = _serving("health-empty-name", Level.SHOULD, "", ": Envoy's and the kubelet's default")
conformance = _serving("health-inference-extension", Level.SHOULD, "inference-extension", ": upstream's manifests probe it")


@check("health-any", Level.MUST, HEALTH)
async def some(bench: Bench) -> None:
    """Health is served, and says SERVING under one name at least that is asked for."""
    names = ("readiness", "", SERVICE, "inference-extension")
    said = {name: await _status(bench, name) for name in names}
    expect("SERVING" in said.values(), f"the names say {said}")


@check("health-unknown-name", Level.SHOULD, HEALTH)
async def unknown(bench: Bench) -> None:
    """A name that does not exist is NOT_FOUND, and not SERVING."""
    status = await _status(bench, "no.such.Service")
    expect(status == "NOT_FOUND", f"no.such.Service is {status}")


@check("health-watch", Level.SHOULD, PRACTICE)
async def watch(bench: Bench) -> None:
    """`Watch` tells the status at once, and stays open to tell of changes."""
    channel = await bench.target.health_channel()
    try:
        follow = HealthStub(channel).Watch  # pyright: ignore[reportAttributeAccessIssue]
        call = follow(HealthCheckRequest(service=""))
        async with asyncio.timeout(bench.target.timeout_s):
            first = await call.read()
        said = HealthCheckResponse.ServingStatus.Name(first.status)
        expect(said == "SERVING", f"the first status is {said}")
        expect(not call.done(), "the call ends after the first status")
        call.cancel()
    except TimeoutError:
        raise Failed("nothing is told") from None
    except (grpc.aio.AioRpcError, AttributeError) as error:  # AttributeError: the end of the stream came instead
        raise Failed(f"it fails: {error.code().name if isinstance(error, grpc.aio.AioRpcError) else 'no status'}") from None
    finally:
        await channel.close()


GROUP = Group("health", "Health", (some, liveness, readiness, ext_proc, empty, conformance, unknown, watch))
