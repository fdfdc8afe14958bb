"""Log-probabilities keep tokens with the same text apart, and their texts and bytes join to the output."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models
from trimtab_engine.api.openai.logprobs import chat_logprobs, completion_logprobs
from trimtab_engine.scheduling.sampling import TokenLogprobs
from trimtab_engine.text.tokenizer import Tokenizer

EMOJI = list("😀日".encode())


def positions_of(*rows: list[int]) -> list[TokenLogprobs]:
    """Return positions with these token IDs, the chosen one first, and the values -1, -2, …"""
    return [TokenLogprobs(row, [-1.0 - place for place in range(len(row))], 1) for row in rows]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer(str(tokenizer_folder))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte fallback (ID = byte), two pieces that differ by a blank, and a piece with the text of a byte."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁true": 256, "true": 257, "A": 258}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(steps)
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return Tokenizer(str(folder))


def test_incomplete_characters_are_named_by_their_bytes(tokenizer: Tokenizer) -> None:
    report = completion_logprobs(tokenizer, positions_of([0x9F, 0xF0, 0x98, 0x61]), 0)
    assert report["tokens"] == ["bytes:\\x9f"]
    assert report["top_logprobs"] == [{"bytes:\\x9f": -1.0, "bytes:\\xf0": -2.0, "bytes:\\x98": -3.0, "a": -4.0}]


def test_offsets_count_characters_of_the_text(tokenizer: Tokenizer) -> None:
    report = completion_logprobs(tokenizer, positions_of(*([byte] for byte in [97, *EMOJI, 98])), 10)
    assert report["text_offset"] == [10, 11, 11, 11, 11, 12, 12, 12, 13]


def test_pieces_that_differ_by_a_blank_stay_apart(sentencepiece: Tokenizer) -> None:
    report = completion_logprobs(sentencepiece, positions_of([256, 257], [257, 256]), 0)
    assert report["tokens"] == [" true", "true"]
    assert report["top_logprobs"] == [{" true": -1.0, "true": -2.0}, {"true": -1.0, " true": -2.0}]
    assert report["text_offset"] == [0, 5]


@pytest.mark.parametrize("chosen", [258, 0x41])
def test_tokens_with_equal_bytes_stay_apart(sentencepiece: Tokenizer, chosen: int) -> None:
    other = 258 + 0x41 - chosen
    report = completion_logprobs(sentencepiece, positions_of([chosen, chosen, other]), 0)
    assert report["tokens"] == ["A"]
    assert list(report["top_logprobs"][0]) == ["A", f"token_id:{other}"]


def test_first_token_of_an_echo_is_the_beginning_of_the_text(sentencepiece: Tokenizer) -> None:
    report = completion_logprobs(sentencepiece, [TokenLogprobs([256], [], 0), *positions_of([256])], 0)
    assert (report["tokens"], report["text_offset"]) == (["true", " true"], [0, 4])


def test_bytes_of_chat_logprobs_join_to_the_text(tokenizer: Tokenizer, sentencepiece: Tokenizer) -> None:
    for name in (None, str):
        report: Any = chat_logprobs(tokenizer, positions_of(*([byte, 0xFF] for byte in EMOJI)), name)
        assert bytes(byte for entry in report["content"] for byte in entry["bytes"]).decode() == "😀日"
        assert report["content"][0]["top_logprobs"][0]["bytes"] == [0xFF]
    report = chat_logprobs(sentencepiece, positions_of([256], *([byte] for byte in EMOJI), [257]))
    assert bytes(byte for entry in report["content"] for byte in entry["bytes"]).decode() == " true😀日true"
    assert (report["content"][0]["token"], report["content"][1]["token"]) == (" true", "�")
