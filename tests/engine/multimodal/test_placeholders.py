"""Each item gets as many placeholders as it has tokens, where the template wrote one for it, and is found there."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trimtab_engine.errors import InvalidRequest
from trimtab_engine.multimodal.items import Modality, MultiModalItem, Span, check_spans
from trimtab_engine.multimodal.placeholders import expand, fold, unfold

IMAGE, VIDEO = 90, 91
PLACEHOLDERS: dict[Modality, int] = {"image": IMAGE, "video": VIDEO}


def an_item(num_tokens: int, modality: Modality = "image") -> MultiModalItem:
    return MultiModalItem(modality, b"digest", num_tokens, (1, 2, 2), None)


def test_placeholders_become_as_many_as_their_items_have_tokens() -> None:
    items = [an_item(3), an_item(1, "video"), an_item(2)]
    ids, spans = expand([5, IMAGE, 6, VIDEO, IMAGE], items, PLACEHOLDERS)
    assert ids == [5, IMAGE, IMAGE, IMAGE, 6, VIDEO, IMAGE, IMAGE]
    assert spans == (Span(1, items[0]), Span(5, items[1]), Span(6, items[2]))


@pytest.mark.parametrize(
    ("ids", "items", "words"),
    [
        ([5, 6], [an_item(1)], "has places for none, but brings 1 image;"),
        ([IMAGE, IMAGE], [an_item(1)], "has places for 2 images, but brings 1 image;"),  # a text held the token
        ([IMAGE], [], "has places for 1 image, but brings none;"),
        ([IMAGE], [an_item(1), an_item(1)], "has places for 1 image, but brings 2 images;"),
        ([IMAGE, VIDEO], [an_item(1, "video"), an_item(1)], "1 image and 1 video, but brings 1 image and 1 video"),
    ],
)
def test_another_number_or_order_is_refused(ids: list[int], items: list[MultiModalItem], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        expand(ids, items, PLACEHOLDERS)


@settings(deadline=None)  # a loaded machine has none
@given(st.lists(st.one_of(st.integers(0, 80), st.tuples(st.sampled_from(["image", "video"]), st.integers(1, 9)))))
def test_folded_placeholders_expand_again(parts: list[int | tuple[Modality, int]]) -> None:
    items = [an_item(part[1], part[0]) for part in parts if isinstance(part, tuple)]
    written = [PLACEHOLDERS[part[0]] if isinstance(part, tuple) else part for part in parts]
    ids, spans = expand(written, items, PLACEHOLDERS)
    check_spans(spans, len(ids))
    assert fold(ids, spans) == written
    assert unfold(written, spans) == ids


@pytest.mark.parametrize(
    "spans",
    [(Span(5, an_item(1)),), (Span(-1, an_item(1)),), (Span(1, an_item(3)), Span(2, an_item(1)))],
)
def test_an_item_outside_of_its_prompt_is_refused(spans: tuple[Span, ...]) -> None:
    with pytest.raises(InvalidRequest, match="which is outside the prompt"):
        unfold([1, 2, 3], spans)
