"""Conversations of gateways with the endpoint picker, over real gRPC connections.

The messages are Envoy's with whole bodies (BUFFERED) and with FULL_DUPLEX_STREAMED, and are written with
field numbers of the published definitions only (test_messages_have_the_published_numbers).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import orjson
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from stub_upstream import until
from trimtab_router.endpoint_picker.conversation import CHUNK_BYTES
from trimtab_router.endpoint_picker.messages import SERVICE, ProcessingRequest, ProcessingResponse
from trimtab_router.endpoint_picker.service import HEALTH_SECONDS, EndpointPicker
from trimtab_router.endpoints.endpoint import Endpoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tests.router.conftest import RouterFactory, RunningRouter

BUFFERED, FULL_DUPLEX = 2, 4
BODY = orjson.dumps({"model": "tiny", "prompt": "hello " * 100})
DESTINATION = "x-gateway-destination-endpoint"
ADDRESSES = ("10.0.0.1:8000", "10.0.0.2:8000")


def headers_message(
    *, mode: int = FULL_DUPLEX, response_mode: int = 0, end: bool = False, subset: Any = None, **fields: str
) -> Any:
    message = ProcessingRequest()
    message.request_headers.end_of_stream = end
    given = {":method": "POST", ":path": "/v1/completions", **{k.replace("_", "-"): v for k, v in fields.items()}}
    for name, value in given.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    message.protocol_config.request_body_mode = mode
    message.protocol_config.response_body_mode = response_mode
    if subset is not None:
        entry = message.metadata_context.filter_metadata.add(key="envoy.lb.subset_hint")
        entry.value.update({f"{DESTINATION}-subset": subset})
    return message


def body_message(body: bytes, *, end: bool) -> Any:
    message = ProcessingRequest()
    message.request_body.body, message.request_body.end_of_stream = body, end
    return message


def response_headers_message() -> Any:
    message = ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    return message


def set_headers(common: Any) -> dict[str, str]:
    return {each.header.key: each.header.raw_value.decode() for each in common.header_mutation.set_headers}


class Gateway:
    """A gateway's client."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self._process = channel.stream_stream(
            f"/{SERVICE}/Process",
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )

    def open(self) -> Any:
        return self._process()

    async def converse(self, *messages: Any) -> list[Any]:
        """Send all messages, end the stream, and return all answers."""
        call = self.open()
        for message in messages:
            await call.write(message)
        await call.done_writing()
        return [answer async for answer in call]


@pytest_asyncio.fixture
async def gateway_of() -> AsyncIterator[Callable[[RunningRouter], Awaitable[Gateway]]]:
    pickers: list[EndpointPicker] = []
    channels: list[Any] = []

    async def start(router: RunningRouter) -> Gateway:
        picker = EndpointPicker(router.dispatcher, router.server)
        port = await picker.start("127.0.0.1:0")
        pickers.append(picker)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        channels.append(channel)
        return Gateway(channel)

    yield start
    for channel in channels:
        await channel.close()
    for picker in pickers:
        await picker.stop()


def set_replicas(router: RunningRouter, number: int = 2) -> None:
    endpoints = [Endpoint(f"pod-{place}", f"10.0.0.{place + 1}", 8000) for place in range(number)]
    router.dispatcher.set_endpoints(endpoints)


async def test_duplex_body_is_sent_back_after_the_choice(routers: RouterFactory, gateway_of: Any) -> None:
    router = await routers.start()
    set_replicas(router)
    gateway = await gateway_of(router)
    body = BODY + b" " * 150_000
    pieces = [body[start : start + 50_000] for start in range(0, len(body), 50_000)]
    messages = [body_message(piece, end=piece is pieces[-1]) for piece in pieces]
    answers = await gateway.converse(headers_message(), *messages)
    first, *chunks = answers
    assert first.WhichOneof("response") == "request_headers"
    destination = set_headers(first.request_headers.response)[DESTINATION]
    assert sorted(destination.split(",")) == sorted(ADDRESSES)
    assert first.dynamic_metadata["envoy.lb"][DESTINATION] == destination
    assert first.request_headers.response.clear_route_cache
    streamed = [chunk.request_body.response.body_mutation.streamed_response for chunk in chunks]
    assert b"".join(each.body for each in streamed) == body
    assert all(len(each.body) <= CHUNK_BYTES for each in streamed)
    assert [each.end_of_stream for each in streamed] == [False] * (len(streamed) - 1) + [True]


async def test_buffered_body_gets_one_answer_per_message(routers: RouterFactory, gateway_of: Any) -> None:
    router = await routers.start()
    set_replicas(router)
    gateway = await gateway_of(router)
    answers = await gateway.converse(
        headers_message(mode=BUFFERED), body_message(BODY, end=True), response_headers_message()
    )
    assert [answer.WhichOneof("response") for answer in answers] == [
        "request_headers",
        "request_body",
        "response_headers",
    ]
    assert not set_headers(answers[0].request_headers.response)
    common = answers[1].request_body.response
    assert set_headers(common)[DESTINATION].split(",")[0] in ADDRESSES
    assert not common.HasField("body_mutation")
    assert common.clear_route_cache


async def test_request_without_body_is_answered_by_its_headers(routers: RouterFactory, gateway_of: Any) -> None:
    router = await routers.start()
    set_replicas(router)
    gateway = await gateway_of(router)
    for mode in (BUFFERED, FULL_DUPLEX):
        (answer,) = await gateway.converse(headers_message(mode=mode, end=True))
        assert DESTINATION in set_headers(answer.request_headers.response)


async def test_trailers_end_a_duplex_body(routers: RouterFactory, gateway_of: Any) -> None:
    router = await routers.start()
    set_replicas(router)
    gateway = await gateway_of(router)
    trailers = ProcessingRequest()
    trailers.request_trailers.SetInParent()
    answers = await gateway.converse(headers_message(), body_message(BODY, end=False), trailers)
    kinds = [answer.WhichOneof("response") for answer in answers]
    assert kinds == ["request_headers", "request_body", "request_trailers"]
    assert not answers[1].request_body.response.body_mutation.streamed_response.end_of_stream


async def test_repeated_end_of_stream_is_ignored(routers: RouterFactory, gateway_of: Any) -> None:
    """Envoy 1.35 and later may repeat the last chunk (envoy#46237)."""
    router = await routers.start()
    set_replicas(router)
    gateway = await gateway_of(router)
    answers = await gateway.converse(headers_message(), body_message(BODY, end=True), body_message(b"", end=True))
    assert [answer.WhichOneof("response") for answer in answers] == ["request_headers", "request_body"]
    assert router.dispatcher.demand.arrived == 1


@pytest.mark.parametrize("subset", [[ADDRESSES[1]], ADDRESSES[1], f"{ADDRESSES[1]}, 10.9.9.9:1"])
async def test_subset_of_the_gateway_is_obeyed(routers: RouterFactory, gateway_of: Any, subset: Any) -> None:
    router = await routers.start()
    set_replicas(router)
    gateway = await gateway_of(router)
    for _ in range(5):
        answers = await gateway.converse(headers_message(subset=subset), body_message(BODY, end=True))
        assert set_headers(answers[0].request_headers.response)[DESTINATION] == ADDRESSES[1]


@pytest.mark.parametrize("subset", [[], "", ["10.9.9.9:1"]])
async def test_empty_subset_is_rejected_with_503(routers: RouterFactory, gateway_of: Any, subset: Any) -> None:
    router = await routers.start()
    set_replicas(router)
    gateway = await gateway_of(router)
    answers = await gateway.converse(headers_message(subset=subset), body_message(BODY, end=True))
    rejected = answers[-1].immediate_response
    assert rejected.status.code == 503
    assert orjson.loads(rejected.body)["error"]["code"] == "no-replica"


async def test_unknown_replicas_are_waited_for(routers: RouterFactory, gateway_of: Any) -> None:
    router = await routers.start()
    gateway = await gateway_of(router)
    conversation = asyncio.create_task(gateway.converse(headers_message(), body_message(BODY, end=True)))
    await router.held(1)
    assert router.dispatcher.demand.held == 1
    set_replicas(router, 1)
    answers = await conversation
    assert set_headers(answers[0].request_headers.response)[DESTINATION] == ADDRESSES[0]


async def test_expired_hold_is_an_immediate_response(routers: RouterFactory, gateway_of: Any) -> None:
    router = await routers.start(max_hold_seconds=0.2)
    gateway = await gateway_of(router)
    (answer,) = await gateway.converse(headers_message(), body_message(BODY, end=True))
    assert answer.immediate_response.status.code == 503
    assert {each.header.key for each in answer.immediate_response.headers.set_headers} >= {"retry-after"}


async def test_gateway_that_leaves_is_removed_from_the_queue(routers: RouterFactory, gateway_of: Any) -> None:
    router = await routers.start()
    gateway = await gateway_of(router)
    call = gateway.open()
    await call.write(headers_message())
    await call.write(body_message(BODY, end=True))
    await router.held(1)
    call.cancel()
    await router.held(0)
    assert router.dispatcher.body_bytes == 0


async def test_load_counts_until_the_response_has_ended(routers: RouterFactory, gateway_of: Any) -> None:
    router = await routers.start()
    set_replicas(router, 1)
    gateway = await gateway_of(router)

    def pending() -> int:
        return sum(state.pending_requests for state in router.registry.replicas(0.0))

    call = gateway.open()
    await call.write(headers_message())
    await call.write(body_message(BODY, end=True))
    answer = await call.read()
    assert set_headers(answer.request_headers.response)["x-trimtab-dispatch"] == f"{router.registry.router_id}:1"
    await call.read()
    await call.write(response_headers_message())
    assert (await call.read()).WhichOneof("response") == "response_headers"
    assert pending() == 1
    await call.done_writing()
    await until(lambda: pending() == 0)


async def test_conversation_ends_after_the_pick_if_responses_would_follow(
    routers: RouterFactory, gateway_of: Any
) -> None:
    router = await routers.start()
    set_replicas(router, 1)
    gateway = await gateway_of(router)
    call = gateway.open()
    await call.write(headers_message(response_mode=FULL_DUPLEX))
    await call.write(body_message(BODY, end=True))
    answers = [answer async for answer in call]  # the router ends the stream, although the gateway has not
    assert [answer.WhichOneof("response") for answer in answers] == ["request_headers", "request_body"]
    assert await call.code() == grpc.StatusCode.OK


async def test_spoofed_headers_are_removed(routers: RouterFactory, gateway_of: Any) -> None:
    router = await routers.start()
    set_replicas(router, 1)
    gateway = await gateway_of(router)
    message = headers_message(x_trimtab_tenant="vip", x_trimtab_replica="r", x_trimtab_dispatch="other:1")
    answers = await gateway.converse(message, body_message(BODY, end=True))
    mutation = answers[0].request_headers.response.header_mutation
    assert sorted(mutation.remove_headers) == ["x-trimtab-replica", "x-trimtab-tenant"]
    assert set_headers(answers[0].request_headers.response)["x-trimtab-dispatch"].endswith(":1")


async def test_body_beyond_the_bound_is_rejected(routers: RouterFactory, gateway_of: Any) -> None:
    router = await routers.start(max_body_bytes=1000)
    set_replicas(router, 1)
    gateway = await gateway_of(router)
    (answer,) = await gateway.converse(headers_message(), body_message(b"x" * 2000, end=False))
    assert answer.immediate_response.status.code == 413


async def test_observed_messages_are_not_answered(routers: RouterFactory, gateway_of: Any) -> None:
    router = await routers.start()
    set_replicas(router, 1)
    gateway = await gateway_of(router)
    message = headers_message(end=True)
    message.observability_mode = True
    assert await gateway.converse(message) == []


async def test_health_services_follow_readiness(routers: RouterFactory, gateway_of: Any) -> None:
    router = await routers.start()
    gateway = await gateway_of(router)
    stub = health_pb2_grpc.HealthStub(gateway.channel)

    async def status(name: str) -> int:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        found: int = answer.status
        return found

    for name in ("", "liveness", "readiness", SERVICE):
        assert await status(name) == health_pb2.HealthCheckResponse.SERVING
    router.server.begin_drain()
    await asyncio.sleep(2 * HEALTH_SECONDS)
    assert await status("readiness") == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await status("liveness") == health_pb2.HealthCheckResponse.SERVING


def test_messages_have_the_published_numbers() -> None:
    """A message as Envoy encodes it: tag bytes are field numbers and wire types."""
    headers = b"\x0a\x12\x0a\x05:path\x1a\x09/v1/chat/"[:2] + b"\x0a\x05:path\x1a\x09/v1/chat/"
    raw = b"\x12" + bytes([len(headers) + 2 + 2]) + b"\x0a" + bytes([len(headers)]) + headers + b"\x18\x01"
    raw += b"\x5a\x04\x08\x04\x10\x04"
    message = ProcessingRequest.FromString(raw)
    assert message.request_headers.headers.headers[0].raw_value == b"/v1/chat/"
    assert message.request_headers.end_of_stream
    assert (message.protocol_config.request_body_mode, message.protocol_config.response_body_mode) == (4, 4)
    answer = ProcessingResponse()
    option = answer.request_headers.response.header_mutation.set_headers.add(append_action=2)
    option.header.key, option.header.raw_value = "a", b"b"
    answer.request_headers.response.clear_route_cache = True
    assert answer.SerializeToString() == b"\x0a\x12\x0a\x10\x12\x0c\x0a\x0a\x0a\x06\x0a\x01a\x1a\x01b\x18\x02\x28\x01"
