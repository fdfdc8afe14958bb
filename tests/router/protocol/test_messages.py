"""Frames of the state stream: any division of the bytes gives the same messages; other bytes are errors."""

import random

import msgspec
import pytest
from trimtab_router.protocol.messages import (
    MAX_ACKNOWLEDGED,
    MAX_CORES,
    MAX_NAMES,
    Acknowledged,
    Beat,
    Delta,
    FrameError,
    FrameReader,
    Hello,
    KeyRule,
    Load,
    Message,
    Snapshot,
    encode_frame,
    pack_keys,
    unpack_keys,
)

MESSAGES: list[Message] = [
    Hello(1, "e", [0, 1], 16, KeyRule(1, 512, ["m"], True)),
    Snapshot(0, 0, Load(running=1, adapters=["a"]), pack_keys([1, 2**64 - 1])),
    Beat(),
    Delta(1, 0, added=pack_keys([3])),
    Acknowledged([1, 2, 3]),
]


@pytest.mark.parametrize("seed", range(5))
def test_messages_survive_any_division_into_chunks(seed: int) -> None:
    data, rng, reader = b"".join(map(encode_frame, MESSAGES)), random.Random(seed), FrameReader()
    received: list[Message] = []
    while data:
        size = rng.randrange(1, 40)
        received += reader.feed(data[:size])
        data = data[size:]
    assert received == MESSAGES


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\xc1",
        b"\x02\x00\x00\x00\x01\x02",
        (lambda body: len(body).to_bytes(4, "little") + body)(msgspec.msgpack.encode({"type": "unknown"})),
        (lambda body: len(body).to_bytes(4, "little") + body)(msgspec.msgpack.encode({"type": "delta", "core": "x"})),
        (lambda body: len(body).to_bytes(4, "little") + body)(b"\x91" * 5000),
        encode_frame(Acknowledged([1] * (MAX_ACKNOWLEDGED + 1))),
        encode_frame(Hello(1, "e", list(range(MAX_CORES + 1)), 16, KeyRule(1, 512))),
        encode_frame(Hello(1, "e", [0], 16, KeyRule(1, 512, ["m"] * (MAX_NAMES + 1)))),
        encode_frame(Snapshot(0, 0, Load(adapters=["a"] * (MAX_NAMES + 1)))),
        encode_frame(Snapshot(0, 0, Load(adapters=["a" * 1000]))),
    ],
)
def test_bytes_that_are_no_message_are_an_error(data: bytes) -> None:
    with pytest.raises(FrameError, match="state stream"):
        FrameReader().feed(data)


def test_unknown_fields_of_a_newer_engine_are_ignored() -> None:
    body = msgspec.msgpack.encode({"type": "acknowledged", "numbers": [1], "added_later": {"a": 1}})
    assert FrameReader().feed(len(body).to_bytes(4, "little") + body) == [Acknowledged([1])]


def test_keys_are_packed_as_eight_little_endian_bytes() -> None:
    assert pack_keys([1, 258]) == bytes([1, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0])
    assert list(unpack_keys(pack_keys([7, 2**64 - 1]) + b"rest")) == [7, 2**64 - 1]
