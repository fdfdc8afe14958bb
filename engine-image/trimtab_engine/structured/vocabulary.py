"""Tokenizer files as llguidance's vocabulary."""

from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from trimtab_engine.errors import ModelError
from trimtab_engine.structured.matcher import Vocabulary
from trimtab_engine.text.tokenizer import TOKENIZER_FILE, Tokenizer


def read_vocabulary(path: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """Return the vocabulary from the model's folder or GGUF file. `vocab_size` is the logits' width. Raises ModelError.

    tokenizer.json is read without transformers, whose import takes longer than the rest of the engine core's startup.
    """
    file = Path(path) / TOKENIZER_FILE
    if not file.exists():
        return vocabulary_of(Tokenizer(path).fast, vocab_size, eos_token_ids)
    try:
        fast = FastTokenizer.from_file(str(file))
    except Exception as error:  # the library's only type
        raise ModelError(f"cannot read the tokenizer of {path}: {error}") from None
    return vocabulary_of(fast, vocab_size, eos_token_ids)


def vocabulary_of(fast: FastTokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    return Vocabulary(fast.to_str(), max(vocab_size, fast.get_vocab_size(with_added_tokens=True)), eos_token_ids)
