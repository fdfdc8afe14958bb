"""Comparison of streamed text with transformers' for random token sequences, whole and token by token.

For a model's own tokenizer, and for two that are built here like Llama 2's and Mistral's (SentencePiece pieces, with
byte fallback). Half of the sequences follow a prompt: their text is that of prompt and sequence together, minus the
prompt's. Tokens of a byte-level vocabulary are drawn from all of it, so they break characters anywhere; bytes of the
others are drawn as whole characters. For invalid bytes, SentencePiece's decoder changes earlier output (one invalid
byte invalidates all bytes before it in a row), which no stream can do.

    python -m engine_benchmarks.detokenising_bench MODEL --sequences 10000
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast
from trimtab_engine.text.tokenizer import Detokenizer, Tokenizer

BUILT = ("llama", "mistral")
SPECIAL = "<s>"
WORDS = ("the", "a", "Paris", ".", "é", "日本", "'s")
IN_BYTES = "aß日😀 \n"
TEXTS = ("The capital of France is", "日本 の", " grüße, ", "a  b\n\n", "😀", "")
MAX_TOKENS = 24  # per sequence
BYTES_SHARE = 0.3  # draws from a SentencePiece vocabulary that are characters in bytes


class Decodes(Protocol):
    """transformers' detokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class Compared:
    """Number of sequences whose text differs from transformers'."""

    tokenizer: str
    num_sequences: int
    num_tokens: int
    num_unequal_whole: int
    num_unequal_streamed: int
    first_unequal: str | None


def sentencepiece(folder: Path, kind: str) -> Tokenizer:
    """Build a tokenizer like Llama 2's ("llama") or Mistral's newer files ("mistral"): bytes, pieces with and without a
    leading blank, a special token. Id = byte for the first 256.
    """
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + [*WORDS, *(f"▁{word}" for word in WORDS), "▁"]
    fast = FastTokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    if kind == "llama":
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    else:
        steps = [decoders.ByteFallback(), decoders.Metaspace("▁", prepend_scheme="first"), decoders.Fuse()]
    fast.decoder = decoders.Sequence(steps)
    fast.add_special_tokens([SPECIAL])
    folder.mkdir()
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return Tokenizer(str(folder))


def any_tokens(tokenizer: Tokenizer, dice: random.Random) -> list[int]:
    size = tokenizer.fast.get_vocab_size()
    return [dice.randrange(size) for _ in range(dice.randrange(1, MAX_TOKENS))]


def whole_characters(tokenizer: Tokenizer, dice: random.Random) -> list[int]:
    """Yield pieces, special tokens, and whole characters in bytes."""
    size = tokenizer.fast.get_vocab_size()
    tokens: list[int] = []
    for _ in range(dice.randrange(1, MAX_TOKENS)):
        in_bytes = dice.random() < BYTES_SHARE
        tokens += dice.choice(IN_BYTES).encode() if in_bytes else [dice.randrange(256, size)]
    return tokens


def streamed(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], *, skip: bool) -> str:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, prompt_token_ids=prompt)
    return "".join([*(detokenizer.push(token_id) for token_id in tokens), detokenizer.flush()])


def compare_text(
    name: str, tokenizer: Tokenizer, reference: Decodes, num_sequences: int, *, has_pieces: bool, seed: int = 7
) -> Compared:
    """Compare. `has_pieces`: a SentencePiece vocabulary, of which characters are drawn whole."""
    dice = random.Random(seed)
    num_tokens = num_whole = num_streamed = 0
    first: str | None = None
    for number in range(num_sequences):
        tokens = whole_characters(tokenizer, dice) if has_pieces else any_tokens(tokenizer, dice)
        prompt: list[int] = []
        if number % 2:
            prompt = whole_characters(tokenizer, dice) if has_pieces else tokenizer.encode(dice.choice(TEXTS))
        skip = dice.random() < 0.5
        num_tokens += len(tokens)
        before = reference.decode(prompt, skip_special_tokens=skip) if prompt else ""
        expected = reference.decode(prompt + tokens, skip_special_tokens=skip)
        is_whole = tokenizer.decode(prompt + tokens, skip_special_tokens=skip) == expected
        is_streamed = before + streamed(tokenizer, prompt, tokens, skip=skip) == expected
        num_whole += not is_whole
        num_streamed += not is_streamed
        if first is None and not (is_whole and is_streamed):
            first = f"{prompt} then {tokens}, skip_special_tokens={skip}"
    return Compared(name, num_sequences, num_tokens, num_whole, num_streamed, first)


def compare_built_tokenizers(kind: str, folder: Path, num_sequences: int) -> Compared:
    tokenizer = sentencepiece(folder / kind, kind)
    reference: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer.fast, clean_up_tokenization_spaces=False)  # type: ignore[no-untyped-call]
    return compare_text(f"built as {kind}'s", tokenizer, reference, num_sequences, has_pieces=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder with a byte-level tokenizer")
    parser.add_argument("--sequences", type=int, default=10_000, help="of each tokenizer (default: %(default)s)")
    args = parser.parse_args(arguments)
    reference: Any = PreTrainedTokenizerFast.from_pretrained(str(args.model), local_files_only=True)
    results = [compare_text(args.model.name, Tokenizer(str(args.model)), reference, args.sequences, has_pieces=False)]
    with tempfile.TemporaryDirectory() as folder:
        results += [compare_built_tokenizers(kind, Path(folder), args.sequences) for kind in BUILT]
    print(json.dumps([asdict(result) for result in results], indent=2))
    sys.exit(any(result.first_unequal for result in results))


if __name__ == "__main__":
    main()
