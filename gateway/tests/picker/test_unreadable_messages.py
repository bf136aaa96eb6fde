"""Messages that are no protobuf, and compressed ones, on both front ends."""

from typing import Any

import grpc
import pytest

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


@pytest.fixture(params=["lean", "grpc"])
def ext_proc(request: pytest.FixtureRequest) -> str:
    return request.param


async def status_of(call: Any, message: bytes) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError):
        await call.write(message)  # which may hear of it already
        await call.read()
    return await call.code(), await call.details()


async def test_a_message_that_cannot_be_read_ends_its_stream_with_internal(world: Any) -> None:
    await world.ready()
    call = world.channel.stream_stream(PROCESS)()
    code, details = await status_of(call, b"\xff\xff")
    assert code is grpc.StatusCode.INTERNAL
    assert details.startswith("the message is unreadable")
    assert world.destinations(await world.stream().ask(world.completion()))


async def test_a_compressed_message_is_read(world: Any) -> None:
    await world.ready()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{world.gateway.grpc_port}", compression=grpc.Compression.Gzip)
    async with channel:
        world.channel, plain = channel, world.channel
        answer = await world.stream().ask(world.completion(user="u" * 10_000))  # which is worth compressing
        world.channel = plain
    assert world.destinations(answer)
