"""All replicas: endpoints, their state streams and the router's own dispatches, merged for the choice of a replica."""

from __future__ import annotations

import itertools
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median_low
from typing import Any, Protocol

from trimtab_router.endpoints.endpoint import Endpoint
from trimtab_router.protocol.messages import Hello, Message
from trimtab_router.protocol.prefix_keys import CUT_BYTES, PromptKeys, api_key_salt, prompt_keys
from trimtab_router.scoring.prefix_index import PrefixIndex
from trimtab_router.scoring.state import ReplicaState, RoutedRequest
from trimtab_router.state_stream.replica import Replica

DEFAULT_BYTES_PER_TOKEN = 4.0
"""English text, until an engine has measured its requests."""
TOKEN_ID_BYTES = 4
MAX_PROMPT_TOKENS = 1 << 30


class Stream(Protocol):
    """A running connection to one replica."""

    def stop(self) -> None:
        """End the connection; nothing is received afterwards."""


Receive = Callable[[Message, float], None]
"""Called with each message and the time of its arrival. It may raise SequenceGap: the stream then starts again."""
StreamFactory = Callable[[Endpoint, Receive], Stream]


class Registry:
    """All replicas of one service. Not thread-safe: one event loop calls it.

    Args:
        served_models: Names of the base model that the router was given; engines report more.
        on_change: Called after each change that can end a hold: new endpoints, a report, an ended request.
    """

    def __init__(
        self,
        served_models: Collection[str] = (),
        *,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.index = PrefixIndex()
        self.router_id = uuid.uuid4().hex
        """Identity of this process for the engines: the first part of x-trimtab-dispatch."""
        self.on_change = on_change
        self._served_models = frozenset(served_models)
        self.start_stream: StreamFactory | None = None
        """Starts the state stream of an endpoint with an admin port (client.py). Without it there are no streams, and
        own dispatches are all that is known.
        """
        self.on_token: Callable[[], None] = lambda: None
        """Called after set_token()."""
        self._replicas: dict[str, Replica] = {}
        self._streams: dict[str, Stream] = {}
        self._free_bits: list[int] = []
        self._numbers = itertools.count(1)
        self._model_names = self._served_models
        self._separates_api_keys = False
        self.bytes_per_token = DEFAULT_BYTES_PER_TOKEN
        """Canonical bytes per prompt token: the median of the engines' measurements."""
        self.tokens: tuple[str, ...] = ()
        """State tokens that the streams try in this order."""

    # --- endpoints ------------------------------------------------------------------------------------------------

    def set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        """Replace the endpoints. Unknown names are new replicas; the same name at another address is one too."""
        given = {endpoint.name: endpoint for endpoint in endpoints}
        for name, replica in list(self._replicas.items()):
            endpoint = given.get(name)
            if endpoint is None or _address(endpoint) != _address(replica.endpoint):
                self._remove(name)
            else:
                replica.endpoint = endpoint
        for name, endpoint in given.items():
            if name not in self._replicas:
                self._add(endpoint)
        self.on_change()

    def _add(self, endpoint: Endpoint) -> None:
        bit = self._free_bits.pop() if self._free_bits else len(self._replicas)
        replica = self._replicas[endpoint.name] = Replica(endpoint, bit, self.index)
        if self.start_stream is not None and endpoint.admin_port is not None:

            def receive(message: Message, now: float) -> None:
                replica.receive(message, now)
                self._learn(message)
                self.on_change()

            self._streams[endpoint.name] = self.start_stream(endpoint, receive)

    def _remove(self, name: str) -> None:
        stream = self._streams.pop(name, None)
        if stream is not None:
            stream.stop()
        replica = self._replicas.pop(name)
        replica.close()
        self._free_bits.append(replica.state.index)

    def set_token(self, token: str, former_token: str | None = None) -> None:
        """Set the state token. During a rotation engines may still know the former one only."""
        tokens = (token,) if former_token is None else (token, former_token)
        if tokens != self.tokens:
            self.tokens = tokens
            self.on_token()

    def close(self) -> None:
        """End all streams."""
        self.set_endpoints(())

    # --- state ----------------------------------------------------------------------------------------------------

    def replicas(self, now: float) -> list[ReplicaState]:
        """Return the state of each replica that takes requests: ready, and not draining, paused or asleep."""
        states = []
        for replica in self._replicas.values():
            if replica.endpoint.ready:
                replica.check_age(now)
                if not replica.state.draining:
                    states.append(replica.state)
        return states

    def state_age(self, replica: str, now: float) -> float | None:
        """Return the seconds since the replica's last message; None if it has no stream, or lost it long ago."""
        known = self._replicas.get(replica)
        return None if known is None or known.received_at is None else max(0.0, now - known.received_at)

    # --- requests -------------------------------------------------------------------------------------------------

    def routed_request(
        self,
        body: Mapping[str, Any],
        *,
        path: str = "",
        api_key: bytes | None = None,
        tenant: str = "",
        priority: int = 0,
        session: str | None = None,
    ) -> RoutedRequest:
        """Return a request in the terms of routing. The body may be any JSON object; without text to continue it has
        no keys and no prompt tokens.
        """
        model = body.get("model")
        adapter = model if isinstance(model, str) and self._is_adapter(model) else None
        salt = api_key_salt(api_key) if api_key and self._separates_api_keys else ""
        prompts = prompt_keys(body, path=path, adapter=adapter or "", salt=salt)
        longest = max(prompts, key=lambda prompt: prompt.num_bytes, default=NO_PROMPT)
        has_token_ids = longest.num_tokens is not None
        max_tokens = body.get("max_completion_tokens") or body.get("max_output_tokens") or body.get("max_tokens")
        return RoutedRequest(
            prompt_tokens=min(sum(map(self._num_tokens, prompts)), MAX_PROMPT_TOKENS),
            keys=longest.keys,
            tokens_per_key=CUT_BYTES / (TOKEN_ID_BYTES if has_token_ids else self.bytes_per_token),
            max_tokens=max_tokens if isinstance(max_tokens, int) else None,
            adapter=adapter,
            tenant=tenant,
            priority=priority,
            session=session,
        )

    def dispatched(self, replica: str, request: RoutedRequest, now: float, expected_ttft: float = 0.0) -> int:
        """Count a request that is sent to the replica now. Return its dispatch number.

        Args:
            replica: Name of the replica.
            request: The request.
            now: Monotonic seconds.
            expected_ttft: Predicted seconds until its first token: its prefix is then cached.
        """
        number = next(self._numbers)
        known = self._replicas.get(replica)
        if known is not None:
            known.dispatched(number, request, now, expected_ttft)
        return number

    def best_core(self, replica: str, request: RoutedRequest) -> int | None:
        """Return the value of X-data-parallel-rank for a request that is sent to the replica, or None for no header."""
        known = self._replicas.get(replica)
        return None if known is None else known.best_core(request.keys)

    def first_byte(self, replica: str, number: int) -> None:
        """Note that the answer to a dispatch has begun: its prompt is computed."""
        known = self._replicas.get(replica)
        if known is not None:
            known.first_byte(number)

    def finished(self, replica: str, number: int) -> None:
        """Forget a dispatch that has ended or failed. Unknown numbers are ignored."""
        known = self._replicas.get(replica)
        if known is not None:
            known.finished(number)
            self.on_change()

    def _num_tokens(self, prompt: PromptKeys) -> int:
        if prompt.num_tokens is not None:
            return prompt.num_tokens
        return max(1, round(prompt.num_bytes / self.bytes_per_token))

    def _is_adapter(self, model: str) -> bool:
        """Return True unless the name is one of the base model; without any name known every model is the base."""
        return bool(self._model_names) and model not in self._model_names

    def _learn(self, message: Message) -> None:
        """Update the values that all requests share. They follow the majority: no single engine can change them."""
        replicas = self._replicas.values()
        if isinstance(message, Hello):
            rules = [replica.hello.key_rule for replica in replicas if replica.hello is not None]
            counts = Counter(name for rule in rules for name in frozenset(rule.models))
            self._model_names = self._served_models.union(
                name for name, count in counts.items() if 2 * count > len(rules)
            )
            self._separates_api_keys = 2 * sum(rule.separates_api_keys for rule in rules) > len(rules)
        measured = [replica.bytes_per_token for replica in replicas if replica.bytes_per_token > 0]
        if measured:
            self.bytes_per_token = median_low(measured)


NO_PROMPT = PromptKeys((), 0)


def dispatch_header(router_id: str, number: int) -> str:
    """Return the value of x-trimtab-dispatch."""
    return f"{router_id}:{number}"


def _address(endpoint: Endpoint) -> tuple[str, int, int | None]:
    return endpoint.host, endpoint.port, endpoint.admin_port
