"""Samples of a load: prompts with their lengths. Random, with shared prefixes, or from a file.

Random prompts are token IDs, which client and server count equally; chats need text, so they are decoded, and their
length is that of the re-encoded text.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trimtab_engine.errors import ConfigError
from trimtab_engine.text.tokenizer import Tokenizer

LOWEST_RANDOM_ID, HIGHEST_RANDOM_ID = 100, 10_000
"""Range of random token IDs without a tokenizer: inside every model's vocabulary, and above its special IDs."""
SHAREGPT_MIN_TOKENS, SHAREGPT_MAX_PROMPT, SHAREGPT_MAX_TOTAL = 4, 1024, 2048
"""Conversations outside these lengths are skipped, as in vLLM."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request to send. `timestamp` is in seconds after the start if the data has it.

    `prompt_len` is None if only the server can count it.
    """

    prompt: str | list[int]
    prompt_len: int | None
    output_len: int | None
    timestamp: float | None = None


@dataclass(frozen=True, slots=True)
class RandomLengths:
    """`--random-input-len` and related flags. Lengths vary by ± range_ratio."""

    input_len: int
    output_len: int
    prefix_len: int = 0
    range_ratio: float = 0.0


class Words:
    """Generator of random token IDs, from a tokenizer's vocabulary without special tokens, or from a range common to
    all models.
    """

    def __init__(self, tokenizer: Tokenizer | None, seed: int, *, content_seed: int | None = None) -> None:
        """`content_seed` only affects the tokens: with another one, the same lengths in the same order have other
        content. None means the same seed.
        """
        self.seed = seed
        self._content_seed = seed if content_seed is None else content_seed
        self._random = np.random.default_rng(seed)
        self._content = np.random.default_rng(self._content_seed)
        if tokenizer is None:
            self._ids = np.arange(LOWEST_RANDOM_ID, HIGHEST_RANDOM_ID)
            return
        special = [token_id for token_id, token in tokenizer.fast.get_added_tokens_decoder().items() if token.special]
        self._ids = np.setdiff1d(np.arange(tokenizer.fast.get_vocab_size()), special)

    def draw(self, count: int) -> list[int]:
        ids: list[int] = self._content.choice(self._ids, count).tolist()
        return ids

    def of(self, key: int, count: int) -> list[int]:
        """Return the same IDs for the same key, independent of the order of calls."""
        ids: list[int] = np.random.default_rng((self._content_seed, key)).choice(self._ids, count).tolist()
        return ids

    def length(self, middle: int, ratio: float) -> int:
        """Return a length within ± ratio of `middle`, at least 1."""
        low, high = int(middle * (1 - ratio)), int(middle * (1 + ratio))
        return max(1, int(self._random.integers(low, high + 1)))


def random_samples(count: int, lengths: RandomLengths, words: Words) -> list[Sample]:
    """Return prompts that only share their first `prefix_len` tokens."""
    prefix = words.draw(lengths.prefix_len)
    samples = []
    for _ in range(count):
        prompt = prefix + words.draw(words.length(lengths.input_len, lengths.range_ratio))
        samples.append(Sample(prompt, len(prompt), words.length(lengths.output_len, lengths.range_ratio)))
    return samples


def prefix_repetition_samples(
    count: int, *, prefix_len: int, suffix_len: int, num_prefixes: int, output_len: int, words: Words
) -> list[Sample]:
    """Return `num_prefixes` prefixes, each with about count / num_prefixes different suffixes, in random order."""
    prefixes = [words.draw(prefix_len) for _ in range(num_prefixes)]
    samples = [
        Sample(prompt := prefixes[number % num_prefixes] + words.draw(suffix_len), len(prompt), output_len)
        for number in range(count)
    ]
    np.random.default_rng(words.seed).shuffle(samples)
    return samples


def sharegpt_samples(path: Path, count: int, output_len: int | None, tokenizer: Tokenizer, seed: int) -> list[Sample]:
    """Return first questions of ShareGPT conversations; output lengths are those of the answers unless `output_len` is
    set.
    """
    conversations = [entry["conversations"] for entry in _json(path) if len(entry.get("conversations", ())) >= 2]
    np.random.default_rng(seed).shuffle(conversations)
    samples: list[Sample] = []
    for question, answer, *_ in conversations:
        if len(samples) == count:
            break
        prompt_len = len(tokenizer.encode(question["value"]))
        length = output_len or len(tokenizer.encode(answer["value"], add_special_tokens=False))
        if min(prompt_len, length) < SHAREGPT_MIN_TOKENS or prompt_len > SHAREGPT_MAX_PROMPT:
            continue
        if prompt_len + length <= SHAREGPT_MAX_TOTAL:
            samples.append(Sample(question["value"], prompt_len, length))
    return samples


def custom_samples(path: Path, count: int, output_len: int, tokenizer: Tokenizer | None) -> list[Sample]:
    """Return JSON lines with "prompt" and optional "output_tokens"; repeated from the start if there are too few."""
    lines = list(_json_lines(path))
    samples = []
    for number in range(count):
        line = lines[number % len(lines)]
        if not isinstance(line.get("prompt"), str):
            raise ConfigError(f'{path}: line {number % len(lines) + 1} has no "prompt"; each line requires one')
        prompt_len = None if tokenizer is None else len(tokenizer.encode(line["prompt"]))
        samples.append(Sample(line["prompt"], prompt_len, int(line.get("output_tokens", output_len))))
    return samples


def as_text(samples: Iterable[Sample], tokenizer: Tokenizer | None) -> list[Sample]:
    """Return the samples with text prompts, for chats. Raises ConfigError without a tokenizer."""
    texts = []
    for sample in samples:
        if isinstance(sample.prompt, str):
            texts.append(sample)
            continue
        if tokenizer is None:
            raise ConfigError("random chat prompts require a tokenizer; set --tokenizer to the model's folder")
        text = tokenizer.fast.decode(sample.prompt, skip_special_tokens=False)
        texts.append(replace(sample, prompt=text, prompt_len=len(tokenizer.encode(text, add_special_tokens=False))))
    return texts


def _text(path: Path) -> str:
    """Return the text of a dataset file. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; set --dataset-path to a file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}; convert it, or "
            f"set another --dataset-path"
        ) from None


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    found = False
    # str.splitlines() would also split at U+2028 and others, which JSON strings may contain.
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip():
            found = True
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: not JSON: {error}") from None
            if not isinstance(entry, dict):
                raise ConfigError(f'{path}, line {number}: not a JSON object; use {{"prompt": "…"}}')
            yield entry
    if not found:
        raise ConfigError(f"{path} is empty; one line per prompt is required")
