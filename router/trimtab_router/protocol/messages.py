"""Messages of the state stream, from an engine to each router (docs/reference/contract.md section 8).

A frame is a length in 4 bytes, little endian, and one message in msgpack. A stream begins with Hello and one Snapshot
per core. Deltas follow as the state changes, and a Beat at least every BEAT_SECONDS. Unknown fields are ignored and
absent ones have their defaults, so that both sides may be one version older.

Keys are packed as 8 bytes each, little endian.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Annotated, ClassVar

import msgspec

VERSION = 1
BEAT_SECONDS = 0.5
"""Longest silence of a stream."""
DELTA_SECONDS = 0.02
"""Deltas within this time are merged."""
MAX_FRAME_BYTES = 16 << 20
LENGTH_BYTES = 4
MAX_CORES = 128
MAX_NAMES = 1024
"""Names of the base model, or adapters in device slots."""
MAX_ACKNOWLEDGED = 1 << 16

Name = Annotated[str, msgspec.Meta(max_length=512)]
Names = Annotated[list[Name], msgspec.Meta(max_length=MAX_NAMES)]


class KeyRule(msgspec.Struct, omit_defaults=True):
    """The engine's rule for prefix keys (prefix_keys.py)."""

    version: int
    cut_bytes: int
    models: Names = []
    """Names of the base model; any other model name in a request is an adapter."""
    separates_api_keys: bool = False
    """True if prompts of different API keys share no cache; the key's salt is then a part of the prompt's root."""


class Hello(msgspec.Struct, tag="hello", omit_defaults=True):
    """First message of a stream, and again when the cores change: everything before is then void."""

    version: int
    epoch: Name
    """Changes when the engine restarts."""
    cores: Annotated[list[int], msgspec.Meta(max_length=MAX_CORES)]
    """Data-parallel cores, each with its own cache."""
    block_size: int
    """Tokens of a KV block."""
    key_rule: KeyRule


class Coefficients(msgspec.Struct, omit_defaults=True):
    """Step time in seconds: base + per_token * tokens + per_sequence * sequences + per_context * context tokens."""

    base: float
    per_token: float
    per_sequence: float
    per_context: float
    residual: float = 0.0
    """Mean relative error of recent steps."""
    samples: int = 0
    """Steps behind the fit."""


class Load(msgspec.Struct, omit_defaults=True):
    """Load and limits of one core, after the step that it reports."""

    running: int = 0
    waiting: int = 0
    late: int = 0
    """Part of `waiting` that can no longer attain its TTFT target and is served last."""
    prefill_tokens: int = 0
    """Uncached tokens still to be computed after the running step: of waiting requests and of those in prefill."""
    context_tokens: int = 0
    """Tokens of running requests in the KV cache."""
    kv_used_tokens: int = 0
    """Tokens that cannot be evicted."""
    kv_total_tokens: int = 0
    token_budget: int = 0
    """max_num_batched_tokens in force."""
    slots: int = 0
    """max_num_seqs in force."""
    prefill_share: float = 0.0
    """Mean share of time spent in steps that compute prompts, 0 to 1."""
    step_seconds: float = 0.0
    """Predicted seconds until the running step ends; 0 if none runs."""
    bytes_per_token: float = 0.0
    """Canonical bytes per prompt token, from recent requests; 0 if unknown."""
    adapters: Names = []
    """Adapters in device slots."""


class Snapshot(msgspec.Struct, tag="snapshot", omit_defaults=True):
    """Complete state of one core; it replaces everything known of this core."""

    sequence: int
    core: int
    load: Load
    keys: bytes = b""
    """Keys whose KV blocks are cached, on the device or in the host cache."""
    coefficients: Coefficients | None = None
    """None until enough steps are measured."""


class Delta(msgspec.Struct, tag="delta", omit_defaults=True):
    """Change of one core. `sequence` is that of the core's last message + 1; otherwise messages were lost."""

    sequence: int
    core: int
    removed: bytes = b""
    """Keys whose blocks were evicted. Applied before `added`."""
    added: bytes = b""
    load: Load | None = None
    """None if unchanged."""
    coefficients: Coefficients | None = None
    """None if unchanged."""


class Acknowledged(msgspec.Struct, tag="acknowledged"):
    """Dispatch numbers of this stream's router that earlier messages include, or that were refused."""

    numbers: Annotated[list[int], msgspec.Meta(max_length=MAX_ACKNOWLEDGED)]


class Draining(msgspec.Struct, tag="draining", omit_defaults=True):
    """The engine accepts no new request, and will end."""

    deadline_seconds: float | None = None
    """Seconds until remaining requests are aborted; None if unknown."""


class Resting(msgspec.Struct, tag="resting", omit_defaults=True):
    """The engine was paused or put to sleep, or works again: then both are None."""

    pause: str | None = None
    """Mode of the pause: abort, wait or keep."""
    sleep: int | None = None
    """Sleep level."""


class Beat(msgspec.Struct, tag="beat"):
    """Nothing has changed."""


Message = Hello | Snapshot | Delta | Acknowledged | Draining | Resting | Beat

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class FrameError(ValueError):
    """Bytes that are no state stream of this version."""


def encode_frame(message: Message) -> bytes:
    """Return one frame."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class FrameReader:
    """Splits received bytes into messages. Holds at most one incomplete frame of MAX_FRAME_BYTES."""

    max_frame_bytes: ClassVar[int] = MAX_FRAME_BYTES

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that these bytes complete.

        Raises:
            FrameError: A frame is too long, or is no message.
        """
        buffer, start = self._buffer, 0
        buffer += data
        messages: list[Message] = []
        while len(buffer) - start >= LENGTH_BYTES:
            body = start + LENGTH_BYTES
            length = int.from_bytes(buffer[start:body], "little")
            if length > self.max_frame_bytes:
                raise FrameError(
                    f"state stream: a frame has {length} bytes; at most {self.max_frame_bytes} are allowed"
                )
            if len(buffer) < body + length:
                break
            try:
                messages.append(_decoder.decode(bytes(buffer[body : body + length])))
            except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
                raise FrameError(f"state stream: a frame is no message ({error})") from None
            start = body + length
        del buffer[:start]
        return messages


def pack_keys(keys: Iterable[int]) -> bytes:
    """Return keys as 8 bytes each."""
    packed = array("Q", keys)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_keys(data: bytes) -> array[int]:
    """Return packed keys. A remainder of less than 8 bytes is ignored."""
    keys = array("Q", data[: len(data) // 8 * 8])
    if sys.byteorder == "big":
        keys.byteswap()
    return keys
