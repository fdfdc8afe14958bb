"""What is refused at the core's door: token ids that the model has no row for."""

from typing import Any

import pytest
from trimtab_engine.core.intake import check_items, check_token_ids
from trimtab_engine.errors import InvalidRequest
from trimtab_engine.messages import AddRequest
from trimtab_engine.multimodal.items import MultiModalItem, Span
from trimtab_engine.scheduling.sampling import Sampling


def a_message(prompt: list[int], **sampling: Any) -> AddRequest:
    return AddRequest("r", prompt, Sampling(**sampling), arrival_time=0.0)


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ([1, 50, 2], {}, "the prompt has token id 50, out of a vocabulary of 50"),
        ([1, -1, 2], {}, "the prompt has token id -1"),
        ([1, 2**31], {}, "the prompt has token id 2147483648"),
        ([1], {"logit_bias": {3: 1.0, 50: 1.0}}, "logit_bias has token id 50"),
        ([1], {"allowed_token_ids": (3, 77)}, "allowed_token_ids has token id 77"),
    ],
)
def test_a_token_id_outside_the_vocabulary_is_refused_and_named(
    prompt: list[int], sampling: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_token_ids(a_message(prompt, **sampling), vocab_size=50)


def test_the_vocabulary_s_own_ids_pass_and_so_do_stops_that_no_token_can_meet() -> None:
    restricted = {"logit_bias": {0: 1.0, 49: -1.0}, "allowed_token_ids": (0, 49), "stop_token_ids": (50,)}
    check_token_ids(a_message([0, 49], **restricted, bad_words=((50,),)), vocab_size=50)


def test_images_and_videos_are_refused_by_name_where_no_tower_computes_them() -> None:
    message = a_message([1, 1, 1])
    check_items(message)
    message.spans = (Span(1, MultiModalItem("image", b"its digest", 1, (1, 2, 2), None)),)
    with pytest.raises(InvalidRequest, match="the prompt has image input, which this engine does not compute"):
        check_items(message)
