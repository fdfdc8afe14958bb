"""Tokenizers with tokens that the model lacks, as fine-tunes add `[PAD]`: text that contains one is a 400."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

ADDED = "[PAD]"  # token 258 of a model with 258 tokens
TEXT = f"hello {ADDED} world"
USER = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def added(
    start_shared_server: Callable[..., Any], tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    folder = tmp_path_factory.mktemp("added")
    for file in tokenizer_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    fast.add_tokens([AddedToken(ADDED, special=True, normalized=False)])
    assert fast.encode(TEXT).ids[6] == 258
    fast.save(str(folder / "tokenizer.json"))
    return start_shared_server(model=folder)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": TEXT}, "prompt"),
        ("/v1/completions", {"prompt": ["fine", TEXT]}, "prompt"),
        ("/v1/completions", {"prompt": [104, 258]}, "prompt"),
        ("/v1/completions", {"prompt": TEXT, "echo": True, "max_tokens": 0}, "prompt"),
        ("/v1/chat/completions", {"messages": USER}, "messages"),
    ],
)
def test_text_with_unknown_token_is_400(added: Any, path: str, body: dict[str, Any], param: str, stream: bool) -> None:
    response = added.http.post(path, json={**body, "stream": stream})
    assert response.status_code == 400, response.text
    error = json.loads(response.text)["error"]
    assert error["param"] == param
    assert "token id 258 ('[PAD]') is out of vocabulary; the model has 258 tokens" in error["message"]


def test_tokenize_accepts_added_tokens(added: Any) -> None:
    answer = added.http.post("/tokenize", json={"prompt": TEXT}).json()
    assert 258 in answer["tokens"]
    assert added.http.post("/detokenize", json={"tokens": answer["tokens"]}).status_code == 400
