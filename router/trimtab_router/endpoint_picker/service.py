"""The gRPC service of the endpoint picker (Envoy's external processing, version 3)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from trimtab_router.endpoint_picker.conversation import Conversation, spoofed_headers
from trimtab_router.endpoint_picker.messages import SERVICE, ProcessingRequest, ProcessingResponse
from trimtab_router.endpoints.endpoint import Endpoint
from trimtab_router.proxy.binding import RETRY_AFTER_SECONDS, BindableRequest
from trimtab_router.proxy.dispatcher import Dispatcher
from trimtab_router.proxy.errors import HttpError
from trimtab_router.proxy.server import ProxyServer
from trimtab_router.scoring.state import Choice
from trimtab_router.state_stream.registry import dispatch_header

HEALTH_SERVICES = ("", "liveness", "readiness", SERVICE)
"""Names that gateways and the Gateway API Inference Extension query."""
HEALTH_SECONDS = 0.5
FORGET_SECONDS = 60.0
"""Time after which a request counts as ended if the gateway does not report its end."""
STOP_SECONDS = 5.0

logger = logging.getLogger(__name__)


class Pick(BindableRequest):
    """One request of a gateway that needs a replica."""

    __slots__ = ("_dispatcher", "_subset", "choice", "number")

    def __init__(self, num_bytes: int, dispatcher: Dispatcher, subset: frozenset[str] | None) -> None:
        super().__init__(num_bytes, monotonic())
        self._dispatcher, self._subset = dispatcher, subset
        self.number: int | None = None
        """Number of the dispatch; None if the request does not count as load."""
        self.choice: asyncio.Future[Choice] = asyncio.get_running_loop().create_future()

    def excluded(self, now: float) -> frozenset[str]:
        if self._subset is None:
            return frozenset()
        return frozenset(
            each.endpoint.name for each in self._dispatcher.replicas() if address(each.endpoint) not in self._subset
        )

    @property
    def is_restricted(self) -> bool:
        return self._subset is not None

    def bind(self, choice: Choice, now: float) -> None:
        if self.choice.done():
            return
        assert self.description is not None
        if self.description.computes:
            best, registry = choice.best, self._dispatcher.registry
            self.number = registry.dispatched(best.replica, self.description.routed, now, best.predicted_ttft)
        self.choice.set_result(choice)

    def fail(self, error: HttpError) -> None:
        if not self.choice.done():
            self.choice.set_exception(error)


class EndpointPicker:
    """Answers the gateway's conversations with the router's choice."""

    def __init__(self, dispatcher: Dispatcher, server: ProxyServer) -> None:
        self._dispatcher, self._proxy = dispatcher, server
        self._grpc: Any = None
        self._health = health_aio.HealthServicer()
        self._health_task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    async def start(self, address: str, certificate: tuple[bytes, bytes] | None = None) -> int:
        """Serve on `host:port`, with TLS if a private key and a certificate chain are given. Return the port.

        Raises:
            OSError: The address cannot be used.
        """
        options = [("grpc.max_receive_message_length", self._dispatcher.config.max_body_bytes + (64 << 10))]
        self._grpc = grpc.aio.server(options=options)
        handler = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=ProcessingRequest.FromString,
            response_serializer=ProcessingResponse.SerializeToString,
        )
        self._grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        try:
            if certificate is not None:
                port = self._grpc.add_secure_port(address, grpc.ssl_server_credentials([certificate]))
            else:
                port = self._grpc.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"endpoint picker: {error}") from None
        await self._grpc.start()
        self._health_task = asyncio.create_task(self._report_health())
        return int(port)

    async def stop(self) -> None:
        """Finish open conversations and stop."""
        if self._health_task is not None:
            self._health_task.cancel()
        await self._grpc.stop(STOP_SECONDS)

    async def _report_health(self) -> None:
        """Keep the health services current."""
        status = health_pb2.HealthCheckResponse
        while True:
            for name in HEALTH_SERVICES:
                serving = name == "liveness" or self._proxy.is_ready
                await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)
            await asyncio.sleep(HEALTH_SECONDS)

    async def _process(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Hold one conversation."""
        conversation = Conversation(self._dispatcher.config.max_body_bytes)
        dispatch: tuple[str, int] | None = None
        try:
            async for message in requests:
                if message.observability_mode:
                    continue
                try:
                    for answer in conversation.receive(message):
                        yield answer
                    if conversation.is_complete and not conversation.is_answered:
                        dispatch, answers = await self._pick(conversation)
                        for answer in answers:
                            yield answer
                        if conversation.closes_after_pick:
                            return
                except HttpError as error:
                    yield conversation.rejection(error)
                    return
        finally:
            if dispatch is not None:
                self._end(*dispatch, at_once=not conversation.closes_after_pick)

    async def _pick(self, conversation: Conversation) -> tuple[tuple[str, int] | None, list[Any]]:
        """Return the dispatch, if it counts as load, and the answers that name the replica.

        Raises:
            HttpError: No replica can be used.
        """
        dispatcher, head = self._dispatcher, conversation.head
        assert head is not None
        subset = conversation.subset
        if subset is not None and not any(address(each.endpoint) in subset for each in dispatcher.replicas()):
            raise HttpError(
                503,
                "no replica is in the gateway's subset; try again later",
                retry_after=RETRY_AFTER_SECONDS,
                reason="no-replica",
            )
        body = bytes(conversation.body)
        description = dispatcher.describer.describe(head, body)
        pick = Pick(len(body), dispatcher, subset)
        dispatcher.body_bytes += len(body)
        try:
            dispatcher.binder.submit(pick, description)
            choice = await pick.choice
        except asyncio.CancelledError:
            dispatcher.binder.cancel(pick)
            if pick.number is not None:
                dispatcher.registry.finished(pick.choice.result().best.replica, pick.number)
            raise
        finally:
            dispatcher.body_bytes -= len(body)
        own, dispatch = [], None
        if pick.number is not None:
            dispatch = choice.best.replica, pick.number
            own.append(("x-trimtab-dispatch", dispatch_header(dispatcher.registry.router_id, pick.number)))
        known = {each.endpoint.name: address(each.endpoint) for each in dispatcher.replicas()}
        names = [each.replica for each in (choice.best, choice.runner_up) if each is not None and each.replica in known]
        set_by_router = {name for name, _ in own}
        removed = spoofed_headers(head, dispatcher.describer.untrusted_headers)
        removed = [name for name in removed if name not in set_by_router]
        return dispatch, conversation.destination([known[name] for name in names], own, removed)

    def _end(self, replica: str, number: int, *, at_once: bool) -> None:
        """Remove a dispatch from the replica's load when the response has ended, or after a while."""
        if at_once:
            self._dispatcher.registry.finished(replica, number)
        else:
            self._loop.call_later(FORGET_SECONDS, self._dispatcher.registry.finished, replica, number)


def address(endpoint: Endpoint) -> str:
    """Return `host:port` as gateways write it."""
    return f"[{endpoint.host}]:{endpoint.port}" if ":" in endpoint.host else f"{endpoint.host}:{endpoint.port}"
