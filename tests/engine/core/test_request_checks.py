"""Rejection of requests with token ids outside the vocabulary."""

from typing import Any

import pytest
from trimtab_engine.config.vision import VisionConfig, VisionWindows
from trimtab_engine.core.request_checks import check_items, check_token_ids, rope_of
from trimtab_engine.errors import InvalidRequest
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.multimodal.items import MultiModalItem, Patches, Span
from trimtab_engine.scheduling.sampling import Sampling, token_mask


def a_message(prompt: list[int], **sampling: Any) -> AddRequest:
    return AddRequest("r", prompt, Sampling(**sampling), arrival_time=0.0)


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ([1, 50, 2], {}, "the prompt has token id 50, out of a vocabulary of 50"),
        ([1, -1, 2], {}, "the prompt has token id -1"),
        ([1, 2**31], {}, "the prompt has token id 2147483648"),
        ([1], {"logit_bias": {3: 1.0, 50: 1.0}}, "logit_bias has token id 50"),
        ([1], {"allowed_tokens": token_mask((3, 77))}, "allowed_token_ids has token id 77"),
    ],
)
def test_a_token_id_outside_the_vocabulary_is_refused_and_named(
    prompt: list[int], sampling: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_token_ids(a_message(prompt, **sampling), vocab_size=50)


def test_vocabulary_ids_and_unreachable_stops_are_accepted() -> None:
    restricted = {"logit_bias": {0: 1.0, 49: -1.0}, "allowed_tokens": token_mask((0, 49)), "stop_token_ids": (50,)}
    check_token_ids(a_message([0, 49], **restricted, bad_words=((50,),)), vocab_size=50)


VISION = VisionConfig(
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_channels=3,
    patch_size=2,
    frames_per_patch=1,
    merge_size=2,
    output_size=8,
    windows=VisionWindows(size=4, whole_layers=frozenset(), tokens_per_second=1),
)


def an_image(num_tokens: int = 1, grid: tuple[int, int, int] = (1, 2, 2), row_size: int = 12) -> MultiModalItem:
    num_patches = grid[0] * grid[1] * grid[2]
    patches = Patches(row_size, bytes(row_size * num_patches), bytes(3 * 1024))
    return MultiModalItem("image", b"its digest", num_tokens, grid, patches)


def a_message_with(item: MultiModalItem) -> AddRequest:
    message = a_message([1, 1, 1, 1])
    message.spans = (Span(1, item),)
    return message


def test_images_and_videos_are_refused_by_name_where_no_tower_computes_them() -> None:
    check_items(a_message([1, 1, 1]), None)
    with pytest.raises(InvalidRequest, match="the prompt has image input, which this engine does not compute"):
        check_items(a_message_with(an_image()), None)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (an_image(row_size=6), r"item 0 \(image\) brings patches of 6 values; the tower reads patches of 12"),
        (MultiModalItem("image", b"its digest", 1, (1, 2, 2), None), "brings none"),
        (an_image(num_tokens=2), r"has 2 tokens over a grid of \(1, 2, 2\); the vision encoder makes a token of 2 x 2"),
        (an_image(grid=(1, 1, 4)), "a token of 2 x 2 patches"),
        (an_image(num_tokens=4, grid=(1, 4, 4)), "takes tokens 1 to 5"),
    ],
)
def test_an_image_that_the_tower_does_not_read_is_refused_and_named(item: MultiModalItem, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_items(a_message_with(item), VISION)


def test_only_a_prompt_with_images_has_positions_of_its_own() -> None:
    check_items(a_message_with(an_image()), VISION)
    assert rope_of(a_message([1, 1, 1]), VISION) is None
    rope = rope_of(a_message_with(an_image(num_tokens=2, grid=(1, 2, 4))), VISION)
    assert rope is not None
    assert rope.prompt == ([0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3])
