"""Stored responses, bounded: the oldest ones are dropped."""

import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the conversation that a later request continues: messages without instructions."""

    response: Json
    input_items: list[Json]
    messages: list[Json]


class ResponseStore:
    """Responses of one API server by ID and owner. The owner is the API key's salt: a key sees only its own."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._packed: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._packed)

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Store a response. One that exceeds the whole store is not kept."""
        packed = msgspec.msgpack.encode(stored)
        self.remove(owner, stored.response["id"])
        self._packed[owner, stored.response["id"]] = packed
        self.num_bytes += sys.getsizeof(packed)
        while self._packed and (len(self._packed) > self._max_responses or self.num_bytes > self._max_bytes):
            _, dropped = self._packed.popitem(last=False)
            self.num_bytes -= sys.getsizeof(dropped)

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a stored response, or None if there is none."""
        packed = self._packed.get((owner, response_id))
        return None if packed is None else msgspec.msgpack.decode(packed, type=StoredResponse)

    def remove(self, owner: str, response_id: str) -> bool:
        """Remove a response. Return False if there is none."""
        packed = self._packed.pop((owner, response_id), None)
        if packed is not None:
            self.num_bytes -= sys.getsizeof(packed)
        return packed is not None
