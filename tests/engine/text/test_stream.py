"""Text and counted tokens are independent of how tokens are split into steps."""

import random
from pathlib import Path

import pytest
from trimtab_engine.text.stream import TextStream
from trimtab_engine.text.tokenizer import Tokenizer

END_TOKEN = 256  # special
NUM_SEQUENCES = 2_000


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer(str(tokenizer_folder))


def test_steps_of_any_size_give_same_text_and_count(tokenizer: Tokenizer) -> None:
    dice = random.Random(3)
    for _ in range(NUM_SEQUENCES):
        tokens = [dice.choice((97, 98, 99, 0xE6, 0x97, 0xA5)) for _ in range(dice.randrange(1, 12))]
        stop = dice.choice(([], ["b"], ["ab", "abc"], ["\N{CJK UNIFIED IDEOGRAPH-65E5}"]))
        reason = dice.choice(("stop", "length"))
        options = {"include_stop": dice.random() < 0.5, "min_tokens": dice.randrange(3)}
        found = set()
        for size in (1, 2, len(tokens)):
            stream = TextStream(tokenizer, skip_special_tokens=True, stop=stop, **options)  # type: ignore[arg-type]
            text, count = "", 0
            for first in range(0, len(tokens), size):
                is_last = first + size >= len(tokens)
                taken = stream.take(tokens[first : first + size], reason if is_last else None)
                text, count = text + taken.text, count + taken.num_tokens
                if stream.matched is not None:
                    break
            found.add((text, count, stream.matched))
        assert len(found) == 1, (tokens, stop, reason, options, found)


@pytest.mark.parametrize(
    ("include_stop", "ends_with_text", "text"),
    [(False, False, "a"), (True, False, "ab"), (False, True, "ab"), (True, True, "ab")],
)
def test_stop_token_has_text_only_if_requested(
    tokenizer: Tokenizer, include_stop: bool, ends_with_text: bool, text: str
) -> None:
    stream = TextStream(tokenizer, skip_special_tokens=True, include_stop=include_stop)
    taken = stream.take([97, 98], "stop", ends_with_text=ends_with_text)
    assert (taken.text, taken.num_tokens) == (text, 2)


def test_special_stop_token_has_no_text_unless_shown(tokenizer: Tokenizer) -> None:
    for skip, text in ((True, "a"), (False, "a<|end|>")):
        stream = TextStream(tokenizer, skip_special_tokens=skip, include_stop=True)
        assert stream.take([97, END_TOKEN], "stop").text == text


def test_special_stop_tokens_are_whole_special_tokens(tokenizer: Tokenizer) -> None:
    stop = ["<|pad|>", "a", "<|pad|>\n", "<|end|>"]
    assert tokenizer.special_stop_tokens(stop, 258) == {257: "<|pad|>", END_TOKEN: "<|end|>"}
    assert tokenizer.special_stop_tokens(stop, 257) == {END_TOKEN: "<|end|>"}


def test_end_without_tokens_returns_held_back_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, skip_special_tokens=True, stop=["abc"])
    assert stream.take([97, 98], None).text == ""
    assert stream.take([], "abort").text == "ab"
    assert TextStream(tokenizer, skip_special_tokens=True).take([], "stop").text == ""


@pytest.mark.parametrize("include_stop", [False, True])
def test_stop_strings_with_special_tokens_end_text_without_them(tokenizer: Tokenizer, include_stop: bool) -> None:
    """The text is cut where the stop string begins in the text with special tokens, or ends with `include_stop`."""
    dice = random.Random(7)
    num_matched = 0
    for _ in range(NUM_SEQUENCES):
        units = ([97], [98], [99], [257], [257], [END_TOKEN], [0xE6, 0x97, 0xA5])  # whole characters
        tokens = [token for _ in range(dice.randrange(1, 10)) for token in dice.choice(units)]
        stop = dice.choice(
            (["<|pad|>b"], ["a<|end|>"], ["b<|pad|><|end|>", "ca"], ["<|pad|>\N{CJK UNIFIED IDEOGRAPH-65E5}"])
        )
        whole = TextStream(tokenizer, skip_special_tokens=False, stop=stop, include_stop=include_stop)
        expected = whole.take(tokens, "length")
        stream = TextStream(tokenizer, skip_special_tokens=True, stop=stop, include_stop=include_stop)
        text, count = "", 0
        for place, token_id in enumerate(tokens):
            taken = stream.take([token_id], "length" if place == len(tokens) - 1 else None)
            text, count = text + taken.text, count + taken.num_tokens
            if stream.matched is not None:
                break
        shown = expected.text.replace("<|pad|>", "").replace("<|end|>", "")
        assert (text, count, stream.matched) == (shown, expected.num_tokens, whole.matched), (tokens, stop)
        num_matched += stream.matched is not None
    assert num_matched > NUM_SEQUENCES / 20


def test_text_of_a_token_keeps_its_blank(tokenizer: Tokenizer) -> None:
    assert tokenizer.added_text(32) == " "
