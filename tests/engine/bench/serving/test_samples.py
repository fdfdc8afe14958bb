"""Samples of a load."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from trimtab_engine.bench.serving import samples as samples_module
from trimtab_engine.bench.serving.samples import (
    HIGHEST_RANDOM_ID,
    LOWEST_RANDOM_ID,
    RandomLengths,
    Sample,
    Words,
    as_text,
    custom_samples,
    prefix_repetition_samples,
    random_samples,
    sharegpt_samples,
)
from trimtab_engine.errors import ConfigError
from trimtab_engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer(str(tokenizer_folder))


def ids(sample: Sample) -> list[int]:
    assert isinstance(sample.prompt, list)
    return sample.prompt


def test_random_prompts_have_requested_lengths_and_prefix() -> None:
    samples = random_samples(5, RandomLengths(20, 7, prefix_len=8), Words(None, seed=1))
    assert [(len(ids(s)), s.prompt_len, s.output_len) for s in samples] == [(28, 28, 7)] * 5
    assert len({tuple(ids(s)[:8]) for s in samples}) == 1
    assert len({tuple(ids(s)[8:]) for s in samples}) == 5


def test_range_ratio_varies_lengths() -> None:
    samples = random_samples(200, RandomLengths(100, 10, range_ratio=0.5), Words(None, seed=1))
    lengths = {s.prompt_len for s in samples}
    assert min(filter(None, lengths)) >= 50
    assert max(filter(None, lengths)) <= 150
    assert len(lengths) > 30


def test_seed_reproduces_prompts() -> None:
    first, again, other = (random_samples(3, RandomLengths(9, 1), Words(None, seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_ids_without_tokenizer_are_in_every_vocabulary() -> None:
    drawn = Words(None, seed=0).draw(5000)
    assert min(drawn) >= LOWEST_RANDOM_ID
    assert max(drawn) < HIGHEST_RANDOM_ID


def test_tokenizer_ids_exclude_special_tokens(tokenizer: Tokenizer) -> None:
    assert set(Words(tokenizer, seed=0).draw(20_000)) == set(range(256))


def test_key_always_gives_the_same_tokens() -> None:
    words = Words(None, seed=3)
    assert words.of(17, 64) == Words(None, seed=3).of(17, 64)
    assert words.of(17, 64)[:32] == words.of(17, 32)
    assert words.of(17, 64) != words.of(18, 64)


def test_prefix_repetition_uses_each_prefix_equally() -> None:
    samples = prefix_repetition_samples(
        12, prefix_len=6, suffix_len=3, num_prefixes=4, output_len=2, words=Words(None, seed=0)
    )
    prefixes = [tuple(ids(s)[:6]) for s in samples]
    assert {prefixes.count(p) for p in prefixes} == {3}
    assert {len(ids(s)) for s in samples} == {9}


def test_sharegpt_uses_questions_and_answer_lengths(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def conversation(question: str, answer: str) -> dict[str, object]:
        return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}

    path = tmp_path / "sharegpt.json"
    entries = [
        conversation("a question", "an answer"),
        conversation("x", "too short a question"),
        {"conversations": []},
    ]
    path.write_text(json.dumps([*entries, conversation("q" * 1025, "too long a question")]))
    assert sharegpt_samples(path, 10, None, tokenizer, seed=0) == [Sample("a question", 10, 9)]
    assert sharegpt_samples(path, 10, 77, tokenizer, seed=0)[0].output_len == 77


def test_custom_lines_repeat_if_too_few(tmp_path: Path) -> None:
    path = tmp_path / "custom.jsonl"
    path.write_text('{"prompt": "one"}\n\n{"prompt": "two", "output_tokens": 3}\n')
    samples = custom_samples(path, 3, 9, None)
    assert [(s.prompt, s.prompt_len, s.output_len) for s in samples] == [
        ("one", None, 9),
        ("two", None, 3),
        ("one", None, 9),
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_custom_prompt_may_contain_other_line_separators(tmp_path: Path, end: str) -> None:
    prompt = "a\u2028b\u2029c\x85d"
    path = tmp_path / "custom.jsonl"
    path.write_text(f'{{"prompt": "{prompt}"}}{end}{{"prompt": "two"}}{end}', encoding="utf-8", newline="")
    assert [sample.prompt for sample in custom_samples(path, 2, 9, None)] == [prompt, "two"]


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "empty"), ("{nonsense", "line 1"), ('{"text": "x"}', 'no "prompt"'), ("[1]", "not a JSON object")],
)
def test_invalid_custom_file_is_named_with_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "custom.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        custom_samples(path, 1, 9, None)


def test_chat_gets_text_and_its_actual_length(tokenizer: Tokenizer) -> None:
    (sample,) = as_text([Sample(list(b"hello"), 5, 2)], tokenizer)
    assert (sample.prompt, sample.prompt_len, sample.output_len) == ("hello", 5, 2)
    with pytest.raises(ConfigError, match="--tokenizer"):
        as_text([Sample([1, 2], 2, 2)], None)


def test_content_seed_keeps_lengths_and_order() -> None:
    def samples(content_seed: int) -> list[Sample]:
        return random_samples(20, RandomLengths(50, 9, range_ratio=0.5), Words(None, 0, content_seed=content_seed))

    first, again, other = samples(1), samples(1), samples(2)
    assert first == again
    assert [(s.prompt_len, s.output_len) for s in first] == [(s.prompt_len, s.output_len) for s in other]
    assert not any(a.prompt == b.prompt for a, b in zip(first, other, strict=True))
    assert Words(None, 0, content_seed=1).of(7, 16) != Words(None, 0, content_seed=2).of(7, 16)


@pytest.mark.parametrize("read", [lambda path: custom_samples(path, 1, 1, None), samples_module._json])
def test_non_utf8_file_is_rejected_with_position(tmp_path: Path, read: Callable[[Path], object]) -> None:
    (path := tmp_path / "data").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ConfigError, match=f"{path} is not UTF-8 text: byte 12 is 0xff"):
        read(path)
