"""gRPC health under every name that gateways and charts ask for."""

from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

LIVENESS = "liveness"
READINESS = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "inference-extension")

Status = health_pb2.HealthCheckResponse


class Health:
    """`liveness` is always SERVING; the other names follow readiness."""

    def __init__(self) -> None:
        self.servicer = _Servicer()

    async def start(self) -> None:
        """Alive and not ready."""
        await self.servicer.set(LIVENESS, Status.SERVING)
        await self.ready(False)

    async def ready(self, ready: bool) -> None:
        """Says whether this process may get requests."""
        for name in READINESS:
            await self.servicer.set(name, Status.SERVING if ready else Status.NOT_SERVING)


class _Servicer(HealthServicer):
    """Lists what it serves, too, which the package's own does not."""

    async def List(self, request: object, context: object) -> object:
        """Return the health of all services."""
        found = {name: await self.Check(health_pb2.HealthCheckRequest(service=name), context) for name in (LIVENESS, *READINESS)}
        return health_pb2.HealthListResponse(statuses=found)  # pyright: ignore[reportAttributeAccessIssue] - not in its stub
