"""A tiny SmolVLM in the server, whose vision encoder runs in transformers, compared with transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
from fixed_resolution_checkpoint import NUM_TOKENS, FixedResolutionCheckpoint, Part, make_fixed_resolution_checkpoint
from media_files import a_picture, data_url, encoded

if TYPE_CHECKING:
    from tests.engine.api.conftest import RealEngine

CAT, DOG = a_picture(30, 20, seed=1), a_picture(16, 24, seed=2)


@pytest.fixture(scope="module")
def seeing(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> FixedResolutionCheckpoint:
    return make_fixed_resolution_checkpoint("smolvlm", tmp_path_factory.mktemp("squares"), tokenizer_folder)


@pytest.fixture(scope="module")
def engine(
    seeing: FixedResolutionCheckpoint, real_engine: "type[RealEngine]", tmp_path_factory: pytest.TempPathFactory
) -> "Iterator[RealEngine]":
    log = tmp_path_factory.mktemp("squares-log") / "log"
    engine = real_engine(seeing.folder, log, "--max-num-seqs", "8", "--max-num-batched-tokens", "16")
    yield engine
    engine.end()


@pytest.mark.parametrize("parts", [("what is it?",), ("look: ", CAT, " it?"), (CAT, "a", DOG, "b", CAT, "which?")])
def test_tokens_equal_transformers(
    engine: "RealEngine", seeing: FixedResolutionCheckpoint, parts: tuple[Part, ...]
) -> None:
    content: Any = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(encoded(part))}}
        for part in parts
    ]
    with openai.OpenAI(base_url=f"{engine.http.base_url}/v1", api_key="none", max_retries=0) as client:
        for _ in range(2):  # the second time from all caches
            answer: Any = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": content}],
                max_tokens=NUM_TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            assert answer.choices[0].token_ids == seeing.says(*parts)
