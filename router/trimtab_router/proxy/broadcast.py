"""Requests that every replica must receive: loading and unloading of adapters."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from trimtab_router.proxy.errors import HttpError
from trimtab_router.proxy.http1 import RequestHead, ResponseHead, upstream_head

if TYPE_CHECKING:
    from trimtab_router.proxy.dispatcher import Dispatcher
    from trimtab_router.proxy.exchange import Exchange
    from trimtab_router.proxy.upstream import ReplicaConnections, UpstreamConnection

MAX_RESPONSE_BYTES = 1 << 20


class _Answer:
    """The response of one replica."""

    def __init__(self, head: RequestHead) -> None:
        self.head = head
        self.response: ResponseHead | None = None
        self.body = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_response_head(self, head: ResponseHead) -> bool:
        self.response = head
        return True

    def on_response_data(self, data: bytes) -> None:
        if len(self.body) < MAX_RESPONSE_BYTES:
            self.body += data

    def on_response_end(self, last: bytes) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def on_upstream_failed(self, cause: str, connection: UpstreamConnection) -> None:
        if not self.done.done():
            self.done.set_exception(OSError(cause))


async def broadcast(dispatcher: Dispatcher, exchange: Exchange) -> None:
    """Send a request to all replicas, and answer with the first error, or with the first response if there is none."""
    replicas = dispatcher.replicas()
    if not replicas:
        exchange.fail(HttpError(503, "no replica is available; try again later", retry_after=1, reason="no-replica"))
        return
    results = await asyncio.gather(*(_send(dispatcher, exchange, each) for each in replicas), return_exceptions=True)
    if exchange.is_done:
        return
    for replica, result in zip(replicas, results, strict=True):
        if isinstance(result, BaseException):
            exchange.fail(HttpError(502, f"replica {replica.endpoint.name}: {result}; send the request again"))
            return
    answers = [result for result in results if isinstance(result, _Answer)]
    chosen = max(answers, key=lambda answer: answer.response.status if answer.response is not None else 0)
    assert chosen.response is not None
    head = chosen.response.client_head(
        [], close=exchange.client.closes_after_response, chunked=chosen.response.is_chunked
    )
    exchange.respond(head + chosen.body, chosen.response.status)


async def _send(dispatcher: Dispatcher, exchange: Exchange, replica: ReplicaConnections) -> _Answer:
    connection = await replica.connect()
    answer = _Answer(exchange.head)
    body = exchange.body
    connection.send(answer, upstream_head(exchange.head, len(body), [], dispatcher.describer.untrusted_headers), body)
    await answer.done
    return answer
