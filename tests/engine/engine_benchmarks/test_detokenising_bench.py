"""Streamed and whole text equal transformers': a part of what the command compares, and that it would see a fault."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from engine_benchmarks.detokenising_bench import BUILT, compared, compared_built, main, sentencepiece
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast
from trimtab_engine.text.tokenizer import Tokenizer

NUM_SEQUENCES = 500
CACHE = Path(os.environ.get("TRIMTAB_CACHE", "~/.cache/trimtab")).expanduser() / "models"
MODEL = CACHE / "SmolLM2-135M-Instruct"


@pytest.mark.parametrize("kind", BUILT)
def test_text_of_pieces_and_bytes_is_transformers(kind: str, tmp_path: Path) -> None:
    result = compared_built(kind, tmp_path, NUM_SEQUENCES)
    assert (result.num_unequal_whole, result.num_unequal_streamed) == (0, 0), result.first_unequal


def test_text_of_byte_level_tokens_is_transformers(
    tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tokenizer_folder), "--sequences", str(NUM_SEQUENCES)])
    results = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0, results
    assert [result["num_unequal_streamed"] for result in results] == [0, 0, 0]


def test_another_text_is_seen(tmp_path: Path) -> None:
    class Shouts:
        """Decodes in capitals."""

        def __init__(self, tokenizer: Tokenizer) -> None:
            self._reference: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer.fast)  # type: ignore[no-untyped-call]

        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            text: str = self._reference.decode(token_ids, skip_special_tokens=skip_special_tokens)
            return text.upper()

    tokenizer = sentencepiece(tmp_path / "llama", "llama")
    result = compared("shouts", tokenizer, Shouts(tokenizer), 100, has_pieces=True)
    assert result.num_unequal_whole > 0
    assert result.num_unequal_streamed > 0
    assert result.first_unequal is not None


@pytest.mark.model
def test_text_of_the_sample_models_tokens_is_transformers() -> None:
    if not MODEL.exists():
        pytest.skip(f"no model at {MODEL}; make model")
    reference: Any = PreTrainedTokenizerFast.from_pretrained(str(MODEL), local_files_only=True)
    result = compared("model", Tokenizer(str(MODEL)), reference, NUM_SEQUENCES, has_pieces=False)
    assert (result.num_unequal_whole, result.num_unequal_streamed) == (0, 0), result.first_unequal
