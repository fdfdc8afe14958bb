"""Both ends of a connection know the core's contents: patches are sent once while they are kept."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trimtab_engine.errors import IntegrityError
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.multimodal.items import MultiModalItem, Patches, Span
from trimtab_engine.multimodal.sender_receiver_cache import Receiver, Sender
from trimtab_engine.scheduling.sampling import Sampling

TABLE = bytes(1024)


def an_item(name: int, size: int = 2048) -> MultiModalItem:
    patches = Patches(1, bytes([name]) * (size - len(TABLE)), TABLE)
    return MultiModalItem("image", bytes([name]), 2, (1, 2, 4), patches)


def send(sender: Sender, receiver: Receiver, *items: MultiModalItem) -> int:
    """Send the items, check that complete items arrive, and return the number sent with patches."""
    spans = tuple(Span(1 + 3 * place, item) for place, item in enumerate(items))
    prompt = [5] + [9, 9, 6] * len(items)
    folded, sent = sender.shortened(prompt, spans)
    assert folded == [5] + [9, 6] * len(items)
    assert receiver.completed(folded, sent) == (prompt, spans)
    return sum(span.item.patches is not None for span in sent)


def test_an_item_is_sent_once_also_within_a_prompt() -> None:
    ends = Sender(10_000), Receiver(10_000)
    assert send(*ends, an_item(1), an_item(2), an_item(1)) == 2
    assert send(*ends, an_item(2), an_item(3)) == 1


def test_a_hit_travels_in_a_few_bytes_whatever_its_size() -> None:
    sender, item = Sender(1 << 20), an_item(1, 1 << 19)
    item = msgspec.structs.replace(item, content_hash=bytes(32), num_tokens=16_000)
    prompt, spans = [5, *[100_000] * 16_000, 6], [Span(1, item)]
    sizes = []
    for _ in range(2):
        token_ids, sent = sender.shortened(prompt, spans)
        sizes.append(len(msgspec.msgpack.encode(AddRequest("r", token_ids, Sampling(), arrival_time=0.0, spans=sent))))
    without = len(msgspec.msgpack.encode(AddRequest("r", [5, 6], Sampling(), arrival_time=0.0)))
    assert sizes[0] > 1 << 19
    assert sizes[1] - without < 100


@pytest.mark.parametrize("max_bytes", [0, 2047])
def test_oversized_item_is_always_sent(max_bytes: int) -> None:
    ends = Sender(max_bytes), Receiver(max_bytes)
    assert [send(*ends, an_item(1)) for _ in range(2)] == [1, 1]


def test_both_forget_when_they_are_told() -> None:
    sender, receiver = Sender(10_000), Receiver(10_000)
    send(sender, receiver, an_item(1))
    sender.clear()
    receiver.clear()
    assert receiver.num_bytes == 0
    assert send(sender, receiver, an_item(1)) == 1


def test_ends_that_differ_are_a_defect_and_no_wrong_picture() -> None:
    sender = Sender(10_000)
    sender.shortened([9, 9], [Span(0, an_item(1))])
    with pytest.raises(IntegrityError, match="item 01 by name, which this core lacks"):
        Receiver(10_000).completed(*sender.shortened([9, 9], [Span(0, an_item(1))]))


@settings(deadline=None)  # a loaded machine has none
@given(
    st.integers(0, 20_000),
    st.lists(st.lists(st.integers(0, 12), max_size=5), max_size=30),
)
def test_both_ends_agree_for_any_message_order(max_bytes: int, requests: list[list[int]]) -> None:
    sender, receiver = Sender(max_bytes), Receiver(max_bytes)
    for names in requests:
        send(sender, receiver, *(an_item(name, 1024 + 500 * name) for name in names))
        assert receiver.num_bytes <= max_bytes
