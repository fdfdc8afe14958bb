"""One request's conversation with the gateway: ext_proc messages in and out, without I/O.

Both ways of sending bodies are supported. With whole bodies (BUFFERED) each message is answered by one message, and the
replica is named in the answer to the body. With FULL_DUPLEX_STREAMED the answer to the headers waits until the body has
been received, and the body is sent back in chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from trimtab_router.endpoint_picker.messages import (
    BODY_MODE_FULL_DUPLEX,
    BODY_MODE_NONE,
    OVERWRITE,
    CommonResponse,
    HeaderMutation,
    ProcessingResponse,
)
from trimtab_router.proxy.errors import HttpError
from trimtab_router.proxy.http1 import ROUTER_HEADER, RequestHead

DESTINATION = "x-gateway-destination-endpoint"
DESTINATION_NAMESPACE = "envoy.lb"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET = "x-gateway-destination-endpoint-subset"
CHUNK_BYTES = 62_000
"""Envoy limits a streamed chunk to 64 KiB."""


class Conversation:
    """State of one conversation."""

    def __init__(self, max_body_bytes: int) -> None:
        self.head: RequestHead | None = None
        self.body = bytearray()
        self.subset: frozenset[str] | None = None
        """Addresses that the gateway allows; None for all."""
        self.is_complete = False
        """True once the whole request has been received."""
        self.is_answered = False
        self.closes_after_pick = False
        """True if the gateway would send the response's body too, which the router does not need."""
        self._max_body_bytes = max_body_bytes
        self._is_duplex = False
        self._waits_for_body = False
        self._has_trailers = False

    def receive(self, message: Any) -> list[Any]:
        """Handle a message of the gateway and return the answers that need no replica.

        Raises:
            HttpError: The request's body is too large.
        """
        if message.HasField("protocol_config"):
            config = message.protocol_config
            self._is_duplex = config.request_body_mode == BODY_MODE_FULL_DUPLEX
            self.closes_after_pick = config.response_body_mode != BODY_MODE_NONE
        for entry in message.metadata_context.filter_metadata:
            if entry.key == SUBSET_NAMESPACE:
                self.subset = _subset(entry.value)
        kind = message.WhichOneof("request")
        if self.is_answered or kind in ("response_headers", "response_body", "response_trailers"):
            return self._acknowledge(kind)
        if kind == "request_headers":
            self.head = _request_head(message.request_headers.headers.headers)
            self.is_complete = message.request_headers.end_of_stream
            self._waits_for_body = not self.is_complete
            return [] if self.is_complete or self._is_duplex else [_continue("request_headers")]
        if kind == "request_body" and not self.is_complete:
            self.body += message.request_body.body
            if len(self.body) > self._max_body_bytes:
                raise HttpError(413, f"the body exceeds {self._max_body_bytes} bytes; send a shorter prompt")
            self.is_complete = message.request_body.end_of_stream
            return [] if self.is_complete or self._is_duplex else [_continue("request_body")]
        if kind == "request_trailers" and not self.is_complete:
            self.is_complete = self._has_trailers = True
        return []

    def destination(
        self, addresses: Sequence[str], own: Iterable[tuple[str, str]], removed: Iterable[str]
    ) -> list[Any]:
        """Return the answers that name the replica.

        Args:
            addresses: `host:port` of the chosen replica, then of others that may be used if it fails.
            own: Headers to add for the replica.
            removed: Names of headers to remove.
        """
        self.is_answered = True
        mutation = HeaderMutation()
        for name, value in ((DESTINATION, ",".join(addresses)), *own):
            option = mutation.set_headers.add(append_action=OVERWRITE)
            option.header.key, option.header.raw_value = name, value.encode()
        mutation.remove_headers.extend(removed)
        common = CommonResponse(header_mutation=mutation, clear_route_cache=True)
        in_headers = self._is_duplex or not self._waits_for_body
        answer = ProcessingResponse()
        (answer.request_headers if in_headers else answer.request_body).response.CopyFrom(common)
        answer.dynamic_metadata.update({DESTINATION_NAMESPACE: {DESTINATION: ",".join(addresses)}})
        answers = [answer]
        if self._is_duplex and self._waits_for_body:
            answers += self._body_chunks()
        if self._has_trailers:
            trailers = ProcessingResponse()
            trailers.request_trailers.SetInParent()
            answers.append(trailers)
        return answers

    def rejection(self, error: HttpError) -> Any:
        """Return the answer that rejects the request."""
        self.is_answered = True
        answer = ProcessingResponse()
        rejected = answer.immediate_response
        rejected.status.code = error.status
        rejected.body = error.body("" if self.head is None else self.head.path)
        rejected.details = error.reason or "rejected by the router"
        headers = [("content-type", "application/json")]
        headers += [("retry-after", str(error.retry_after))] if error.retry_after else []
        headers += [("x-trimtab-dropped", error.reason)] if error.reason else []
        for name, value in headers:
            option = rejected.headers.set_headers.add(append_action=OVERWRITE)
            option.header.key, option.header.raw_value = name, value.encode()
        return answer

    def _body_chunks(self) -> list[Any]:
        """Return the body for the replica, unchanged."""
        found = []
        for start in range(0, max(len(self.body), 1), CHUNK_BYTES):
            answer = ProcessingResponse()
            chunk = answer.request_body.response.body_mutation.streamed_response
            chunk.body = bytes(self.body[start : start + CHUNK_BYTES])
            chunk.end_of_stream = start + CHUNK_BYTES >= len(self.body) and not self._has_trailers
            found.append(answer)
        return found

    def _acknowledge(self, kind: str | None) -> list[Any]:
        """Return the answer to a message after the choice: it changes nothing."""
        if kind in ("response_headers", "response_body", "response_trailers", "request_trailers"):
            answer = ProcessingResponse()
            getattr(answer, kind).SetInParent()
            return [answer]
        return []  # Envoy may repeat the last chunk of a body


def _continue(kind: str) -> Any:
    answer = ProcessingResponse()
    getattr(answer, kind).SetInParent()
    return answer


def _subset(metadata: Any) -> frozenset[str] | None:
    """Return the addresses of a subset hint: a list, or one string with commas."""
    if SUBSET not in metadata:
        return None
    value = metadata[SUBSET]
    items = value.split(",") if isinstance(value, str) else [str(item) for item in value]
    return frozenset(item.strip() for item in items if item.strip())


def _request_head(headers: Iterable[Any]) -> RequestHead:
    fields: dict[bytes, bytes] = {}
    for header in headers:
        fields.setdefault(header.key.lower().encode(), header.raw_value or header.value.encode())
    target = fields.get(b":path", b"/")
    return RequestHead(
        method=fields.get(b":method", b"POST"),
        target=target,
        path=target.partition(b"?")[0].decode("latin-1"),
        is_http11=True,
        headers=[],
        fields=fields,
        content_length=0,
        is_chunked=False,
        keep_alive=True,
        expects_continue=False,
    )


def spoofed_headers(head: RequestHead, untrusted: Iterable[bytes]) -> list[str]:
    """Return the names of headers that only the router may set, and of untrusted ones."""
    return sorted(
        name.decode("latin-1") for name in head.fields if name.startswith(ROUTER_HEADER) or name in frozenset(untrusted)
    )
