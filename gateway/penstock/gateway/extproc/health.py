"""gRPC health under every name that gateways and charts ask for."""

from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

LIVENESS = "liveness"
READINESS = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "inference-extension")

Status = health_pb2.HealthCheckResponse


class Health:
    """`liveness` is always SERVING; the other names follow readiness."""

    def __init__(self) -> None:
        self.servicer = HealthServicer()

    async def start(self) -> None:
        """Alive and not ready."""
        await self.servicer.set(LIVENESS, Status.SERVING)
        await self.ready(False)

    async def ready(self, ready: bool) -> None:
        """Says whether this process may get requests."""
        for name in READINESS:
            await self.servicer.set(name, Status.SERVING if ready else Status.NOT_SERVING)
