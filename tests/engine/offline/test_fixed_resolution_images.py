"""Prompts with images for vision encoders that run in transformers: the tokens equal transformers'."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fixed_resolution_checkpoint import (
    NUM_TOKENS,
    WORDS,
    FixedResolutionCheckpoint,
    Part,
    make_fixed_resolution_checkpoint,
)
from media_files import a_picture
from trimtab_engine import LLM, SamplingParams
from trimtab_engine.errors import InvalidRequest

CAT, DOG, BIRD = a_picture(30, 20, seed=1), a_picture(16, 24, seed=2), a_picture(9, 40, seed=3)
TINY = a_picture(16, 16, seed=4)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", params=list(WORDS))
def seeing(
    request: pytest.FixtureRequest, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> FixedResolutionCheckpoint:
    return make_fixed_resolution_checkpoint(request.param, tmp_path_factory.mktemp("squares"), tokenizer_folder)


@pytest.fixture(scope="module")
def llm(seeing: FixedResolutionCheckpoint) -> Iterator[LLM]:
    with LLM(str(seeing.folder), device="cpu", cpu_threads=1, num_gpu_blocks_override=60, max_model_len=256) as llm:
        yield llm


def test_generated_tokens_equal_transformers(llm: LLM, seeing: FixedResolutionCheckpoint) -> None:
    conversations: list[tuple[Part, ...]] = [
        ("no picture",),
        ("see ", CAT, " what?"),
        (CAT, "a", DOG, "b", BIRD, "which?"),
        (TINY, "and", CAT),
    ]
    for parts in conversations:
        prompt = "".join(part if isinstance(part, str) else seeing.picture for part in parts)
        pictures = [part for part in parts if not isinstance(part, str)]
        given = {"prompt": prompt, **({"multi_modal_data": {"image": pictures}} if pictures else {})}
        (output,) = llm.generate(given, GREEDY, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == seeing.says(*parts)


def test_videos_and_missing_images_are_rejected(llm: LLM, seeing: FixedResolutionCheckpoint) -> None:
    with pytest.raises(InvalidRequest, match="does not accept videos"):
        llm.generate({"prompt": "x", "multi_modal_data": {"video": [CAT, CAT]}}, GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="has places for 2 images, but brings 1"):
        llm.generate({"prompt": seeing.picture * 2, "multi_modal_data": {"image": CAT}}, GREEDY, use_tqdm=False)
