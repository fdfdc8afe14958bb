"""The engine core's connections to its clients (API servers): receives from all, routes outputs to the requester."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import zmq

from trimtab_engine.errors import IntegrityError, InvalidRequest
from trimtab_engine.ipc.network import is_ipv6_url, is_on_network
from trimtab_engine.ipc.shared_secret import SharedSecret
from trimtab_engine.messages.channel import FromCore, ToCore
from trimtab_engine.messages.lifecycle import ClientAddresses, CoreFailed
from trimtab_engine.messages.requests import (
    REFUSED,
    AbortRequests,
    AddRequest,
    ClientOutputs,
    ForgetMedia,
    PlainTokens,
    SequenceOutput,
    StepOutputs,
)
from trimtab_engine.multimodal.sender_receiver_cache import Receiver

LINGER_MILLISECONDS = 2000  # for the last message to leave before the process ends


@dataclass(frozen=True, slots=True)
class _PlainShare:
    """One client's part of a step's plain tokens: request ids and their indices among all."""

    request_ids: list[str]
    places: list[int]

    def of(self, token_ids: list[int]) -> list[int]:
        return token_ids if len(self.places) == len(token_ids) else [token_ids[place] for place in self.places]


def send_final_message(
    clients: Sequence[ClientAddresses], failure: CoreFailed, secret: SharedSecret | None = None
) -> None:
    """Send the reason for this process's end to every client. Callable from any thread: it opens its own sockets."""
    context = zmq.Context()
    body = msgspec.msgpack.encode(failure)
    for client in clients:
        outbox = context.socket(zmq.PUSH)
        outbox.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        _open_to(outbox, client.from_core, secret)
        outbox.connect(client.from_core)
        outbox.send(body)
        outbox.close()
    context.term()


def _open_to(socket: "zmq.Socket[bytes]", address: str, secret: SharedSecret | None) -> None:
    """Make a socket ready to be connected to this address."""
    socket.setsockopt(zmq.IPV6, is_ipv6_url(address))
    if secret is not None and is_on_network(address):
        secret.set_curve_client(socket)


class Clients:
    """Two one-way sockets to each client (API server). The clients bind, the core connects. `secret`: that of the
    nodes, for clients on another one. `media_cache_bytes`: how much of its images and videos is kept for each.
    """

    def __init__(
        self, clients: Sequence[ClientAddresses], secret: SharedSecret | None = None, *, media_cache_bytes: int = 0
    ) -> None:
        self._secret = secret
        self._media = [Receiver(media_cache_bytes) for _ in clients]
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        for client in clients:
            _open_to(self._inbox, client.to_core, secret)
            self._inbox.connect(client.to_core)
        self._outboxes = [self._connect(client.from_core) for client in clients]
        self._client_of: dict[str, int] = {}
        """The client index of live requests that are not client 0's."""
        self._plain = [_PlainShare([], []) for _ in clients]
        """Each client's share of the last plain tokens."""
        self._plain_ids: list[str] = []
        """The requests of those."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)

    def _connect(self, address: str) -> "zmq.Socket[bytes]":
        outbox = self._context.socket(zmq.PUSH)
        outbox.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        outbox.setsockopt(zmq.SNDHWM, 0)  # outputs are never dropped: the API servers read all of them
        _open_to(outbox, address, self._secret)
        outbox.connect(address)
        return outbox

    def send(self, message: FromCore, client_index: int = 0) -> None:
        self._outboxes[client_index].send(self._encoder.encode(message))

    def broadcast(self, message: FromCore) -> None:
        """Send to every client."""
        for index in range(len(self._outboxes)):
            self.send(message, index)

    def refuse(self, request: AddRequest) -> None:
        """Reject a request that must not queue: the client tries another core."""
        self._client_of.pop(request.request_id, None)
        self.send(ClientOutputs([SequenceOutput(request.request_id, [], REFUSED)]), request.client_index)

    def send_step(self, step: StepOutputs) -> None:
        """Send the statistics to client 0 and each request's output to its requester."""
        plain = {} if step.plain is None else self._shares_of(step.plain)
        request_outputs: dict[int, list[SequenceOutput]] = {0: []}
        if self._client_of:
            for output in step.request_outputs:
                index = self._client_of.get(output.request_id, 0)
                request_outputs.setdefault(index, []).append(output)
                if output.finish_reason is not None:
                    self._client_of.pop(output.request_id, None)
        else:
            request_outputs[0] = step.request_outputs
        self.send(StepOutputs(request_outputs.pop(0), step.stats, plain.pop(0, None), step.state))
        for index in sorted({*request_outputs, *plain}):
            outputs = ClientOutputs(request_outputs.get(index, []), step.stats.step, step.stats.time, plain.get(index))
            self.send(outputs, index)

    def _shares_of(self, plain: PlainTokens) -> dict[int, PlainTokens]:
        """Split plain tokens by client. Request ids are included only if they changed; the engine passes the same list
        object while they stay the same.
        """
        are_known = plain.request_ids is self._plain_ids
        if not are_known:
            self._plain_ids = plain.request_ids or []
            self._plain = [_PlainShare([], []) for _ in self._plain]
            for place, request_id in enumerate(self._plain_ids):
                share = self._plain[self._client_of.get(request_id, 0) if self._client_of else 0]
                share.request_ids.append(request_id)
                share.places.append(place)
        return {
            index: PlainTokens(share.of(plain.token_ids), None if are_known else share.request_ids)
            for index, share in enumerate(self._plain)
            if share.places
        }

    def receive(self, timeout_milliseconds: int) -> list[ToCore]:
        """Return all pending messages; wait for the first one up to the timeout."""
        messages: list[ToCore] = []
        while self._inbox.poll(0 if messages else timeout_milliseconds):
            message = self._decoder.decode(self._inbox.recv())
            self._note_client(message)
            match message:
                case AddRequest(spans=spans) if spans and not self._is_completed(message):
                    continue
                case ForgetMedia(index):
                    self._media[index].clear()
                    continue
            messages.append(message)
        return messages

    def _is_completed(self, message: AddRequest) -> bool:
        """Return True if the request has all its placeholders and patches now; otherwise end it with an error."""
        try:
            message.prompt_token_ids, message.spans = self._media[message.client_index].completed(
                message.prompt_token_ids, message.spans
            )
        except (IntegrityError, InvalidRequest) as error:
            self._client_of.pop(message.request_id, None)
            ended = SequenceOutput(message.request_id, [], "error", error=str(error), is_engines_fault=True)
            self.send(ClientOutputs([ended]), message.client_index)
            return False
        return True

    def _note_client(self, message: ToCore) -> None:
        match message:
            case AddRequest(client_index=index) if index:
                self._client_of[message.request_id] = index
            case AbortRequests() if self._client_of:
                for request_id in message.request_ids:
                    self._client_of.pop(request_id, None)

    def close(self) -> None:
        self._inbox.close(linger=0)
        for outbox in self._outboxes:
            outbox.close()
        self._context.term()
