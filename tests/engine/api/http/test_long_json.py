"""Long responses are encoded in short pieces, with the same result as in one piece."""

import json
from typing import Any

import pytest
from trimtab_engine.api.http.long_json import MAX_ENTRIES_PER_PIECE, long_json, pieces

LIKELY = {f"token {n}": -0.5 * n for n in range(20)}
ANSWERS: dict[str, Any] = {
    "short": {"id": "a", "choices": [{"text": 'ü\n"', "logprobs": None}], "usage": {"prompt_tokens": 1}},
    "empty": {"choices": [], "error": {}},
    "log-probabilities": {"choices": [{"logprobs": {"tokens": ["a"] * 3_000, "top_logprobs": [LIKELY] * 1_000}}] * 3},
    "token ids": {"choices": [{"prompt_token_ids": list(range(100_000))}], "usage": None},
    "one long entry": {"rows": [{str(n): n for n in range(3 * MAX_ENTRIES_PER_PIECE)}, 1]},
    "deep": {"a": [[[list(range(50))] * 60] * 3]},
}


@pytest.mark.parametrize("name", ANSWERS)
def test_pieces_equal_json_dumps(name: str) -> None:
    written = json.dumps(ANSWERS[name], ensure_ascii=False, separators=(",", ":"))
    assert long_json(ANSWERS[name]) == written.encode()


@pytest.mark.parametrize("name", ANSWERS)
def test_every_piece_is_short(name: str) -> None:
    longest = len(json.dumps(LIKELY)) / len(LIKELY) * MAX_ENTRIES_PER_PIECE
    assert max(map(len, pieces(ANSWERS[name]))) <= longest


def test_non_json_value_raises_value_error() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        long_json({"logprob": float("nan")})
