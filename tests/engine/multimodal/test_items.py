"""Images and videos of a request are validated before any computation, and survive serialisation."""

import msgspec
import pytest
from trimtab_engine.errors import InvalidRequest
from trimtab_engine.messages.channel import ToCore
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.multimodal.items import MultiModalItem, Patches, Span, check_spans
from trimtab_engine.scheduling.sampling import Sampling


def an_image(num_tokens: int = 4, grid: tuple[int, int, int] = (1, 4, 4), num_rows: int = 16) -> MultiModalItem:
    return MultiModalItem("image", b"its digest", num_tokens, grid, Patches(6, bytes(6 * num_rows), bytes(3 * 1024)))


def a_video(patches: Patches | None) -> MultiModalItem:
    return MultiModalItem("video", b"its digest", 4, (2, 2, 4), patches)


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [Span(0, an_image())],
        [
            Span(1, an_image()),
            Span(5, an_image()),
            Span(16, an_image()),
        ],  # the first two touch, the last ends the prompt
    ],
)
def test_spans_that_follow_one_another_within_the_prompt_pass(spans: list[Span]) -> None:
    check_spans(spans, num_prompt_tokens=20)


def test_patches_may_be_where_the_item_is_not() -> None:
    check_spans([Span(0, MultiModalItem("image", b"its digest", 4, (1, 4, 4), None))], num_prompt_tokens=4)


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([Span(-1, an_image())], r"item 0 \(image\) takes tokens -1 to 3"),
        ([Span(17, an_image())], "takes tokens 17 to 21, which must lie between 0, .*, and the prompt's end at 20"),
        ([Span(2, an_image()), Span(5, an_image())], "item 1 .* takes tokens 5 to 9, which must lie between 6"),
        ([Span(8, an_image()), Span(2, an_image())], "item 1 .* takes tokens 2 to 6"),
        ([Span(0, an_image(num_tokens=0))], "has 0 tokens"),
        ([Span(0, an_image(grid=(1, 0, 4), num_rows=0))], r"over a grid of \(1, 0, 4\)"),
        ([Span(0, an_image(num_rows=15))], "brings 15 patches, but its grid .* has 16"),
        ([Span(0, a_video(Patches(0, b"1234", bytes(1024))))], r"item 0 \(video\) .* not whole: rows of 0 values"),
        ([Span(0, a_video(Patches(4, bytes(65), bytes(1024))))], "not whole"),  # a row and a bit
        ([Span(0, a_video(Patches(4, bytes(64), bytes(3 * 1024))))], "not whole"),  # 4 values of 3 channels
        ([Span(0, a_video(Patches(4, bytes(64), bytes(1000))))], "not whole"),  # not a number for each of 256 values
        ([Span(0, a_video(Patches(4, bytes(64), b"")))], "not whole"),
    ],
)
def test_span_outside_prompt_or_incomplete_is_rejected(spans: list[Span], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_spans(spans, num_prompt_tokens=20)


def test_items_reach_the_core_as_they_were_sent() -> None:
    video = MultiModalItem("video", b"another", 8, (2, 4, 4), None, seconds_per_step=0.5)
    sent = AddRequest("r", [9] * 20, Sampling(), arrival_time=0.0, spans=(Span(1, an_image()), Span(5, video)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=ToCore) == sent
