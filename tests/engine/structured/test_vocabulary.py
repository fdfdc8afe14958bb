"""The vocabulary is equal, read from tokenizer.json or from the complete tokenizer."""

import json
from pathlib import Path

import pytest
from trimtab_engine.errors import ModelError
from trimtab_engine.structured.vocabulary import read_vocabulary, vocabulary_of
from trimtab_engine.text.tokenizer import Tokenizer


def test_fast_path_equals_complete_tokenizer(tokenizer_folder: Path) -> None:
    whole = vocabulary_of(Tokenizer(str(tokenizer_folder)).fast, 258, (256,))
    short = read_vocabulary(str(tokenizer_folder), 258, (256,))
    assert (short.vocab_size, short.eos_token_ids) == (whole.vocab_size, whole.eos_token_ids)
    ours, theirs = (json.loads(vocabulary.tokenizer_json) for vocabulary in (short, whole))
    for part in ("model", "added_tokens", "normalizer", "pre_tokenizer", "decoder"):
        assert ours[part] == theirs[part]


def test_unreadable_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        read_vocabulary(str(tmp_path), 258, (256,))
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(ModelError, match="cannot read the tokenizer of"):
        read_vocabulary(str(tmp_path), 258, (256,))
