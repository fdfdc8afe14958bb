"""Streamed and whole text equal transformers' for part of the command's comparison, and a fault is detected."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from engine_benchmarks.detokenising_bench import BUILT, compare_built_tokenizers, compare_text, main, sentencepiece
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast
from trimtab_engine.text.tokenizer import Tokenizer

NUM_SEQUENCES = 500
CACHE = Path(os.environ.get("TRIMTAB_CACHE", "~/.cache/trimtab")).expanduser() / "models"
MODEL = CACHE / "SmolLM2-135M-Instruct"


@pytest.mark.parametrize("kind", BUILT)
def test_text_of_pieces_and_bytes_equals_transformers(kind: str, tmp_path: Path) -> None:
    result = compare_built_tokenizers(kind, tmp_path, NUM_SEQUENCES)
    assert (result.num_unequal_whole, result.num_unequal_streamed) == (0, 0), result.first_unequal


def test_text_of_byte_level_tokens_equals_transformers(
    tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tokenizer_folder), "--sequences", str(NUM_SEQUENCES)])
    results = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0, results
    assert [result["num_unequal_streamed"] for result in results] == [0, 0, 0]


def test_different_text_is_detected(tmp_path: Path) -> None:
    class Shouts:
        """Decodes in upper case."""

        def __init__(self, tokenizer: Tokenizer) -> None:
            self._reference: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer.fast)  # type: ignore[no-untyped-call]

        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            text: str = self._reference.decode(token_ids, skip_special_tokens=skip_special_tokens)
            return text.upper()

    tokenizer = sentencepiece(tmp_path / "llama", "llama")
    result = compare_text("shouts", tokenizer, Shouts(tokenizer), 100, has_pieces=True)
    assert result.num_unequal_whole > 0
    assert result.num_unequal_streamed > 0
    assert result.first_unequal is not None


@pytest.mark.model
def test_text_of_sample_model_tokens_equals_transformers() -> None:
    if not MODEL.exists():
        pytest.skip(f"no model at {MODEL}; make model")
    reference: Any = PreTrainedTokenizerFast.from_pretrained(str(MODEL), local_files_only=True)
    result = compare_text("model", Tokenizer(str(MODEL)), reference, NUM_SEQUENCES, has_pieces=False)
    assert (result.num_unequal_whole, result.num_unequal_streamed) == (0, 0), result.first_unequal
