"""The grpc.aio front end of the ext_proc state machine."""

import asyncio
import logging

import grpc
from grpc.aio import EOF  # pyright: ignore[reportAttributeAccessIssue] - generated at import

from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorServicer
from penstock.gateway.extproc import answers
from penstock.gateway.extproc.call import Refused
from penstock.gateway.extproc.exchange import Director, Exchange, UnsupportedMode

log = logging.getLogger(__name__)


class ExtProcService(ExternalProcessorServicer):
    """`envoy.service.ext_proc.v3.ExternalProcessor`: one stream for each HTTP request."""

    def __init__(self, director: Director) -> None:
        self._director = director
        self.open = 0
        """Streams in progress."""
        self.idle = asyncio.Event()
        """Set while there is none."""
        self.idle.set()

    async def Process(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        """See the protocol. A stream that the caller resets cancels this coroutine, wherever it waits."""
        exchange = Exchange(self._director)
        self.open += 1
        self.idle.clear()
        try:
            while not exchange.over and (message := await context.read()) is not EOF:
                for answer in await exchange.receive(message):
                    await context.write(answer)
        except UnsupportedMode as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except Exception:
            if context.cancelled() or context.done():
                raise
            # A mistake of ours in one request must not look like a dead picker, which Envoy would retry.
            log.exception("a request could not be decided")
            failed = Refused(500, "the gateway failed to decide where this request goes", "internal_error")
            await context.write(answers.immediate(answers.refusal(failed)))
        finally:
            self.open -= 1
            if not self.open:
                self.idle.set()
            exchange.close()
