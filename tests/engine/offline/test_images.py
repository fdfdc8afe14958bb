"""Prompts of the offline LLM with Pillow images: the tokens equal transformers'."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from media_files import a_picture
from trimtab_engine import LLM, SamplingParams
from trimtab_engine.errors import InvalidRequest
from vision_checkpoint import NUM_TOKENS, Seeing, make_vision_checkpoint

CAT, DOG = a_picture(30, 20, seed=1), a_picture(16, 24, seed=2)
FRAMES = [a_picture(16, 16, seed=seed) for seed in range(4, 8)]
IMAGE, VIDEO = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def seeing(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return make_vision_checkpoint(tmp_path_factory.mktemp("seeing"), tokenizer_folder)


@pytest.fixture(scope="module")
def llm(seeing: Seeing) -> Iterator[LLM]:
    limits: dict[str, Any] = {"limit_mm_per_prompt": {"image": 2, "video": 1}, "max_model_len": 256}
    with LLM(str(seeing.folder), device="cpu", cpu_threads=1, num_gpu_blocks_override=40, **limits) as llm:
        yield llm


def tokens(llm: LLM, prompt: str, data: dict[str, Any]) -> list[int]:
    (output,) = llm.generate({"prompt": prompt, "multi_modal_data": data}, GREEDY, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_tokens_with_images_equal_transformers(llm: LLM, seeing: Seeing) -> None:
    assert tokens(llm, f"see {IMAGE} what?", {"image": CAT}) == seeing.says("see ", CAT, " what?")
    assert tokens(llm, f"{IMAGE}a{IMAGE}b", {"image": [CAT, DOG]}) == seeing.says(CAT, "a", DOG, "b")


def test_conversation_may_have_images_between_texts(llm: LLM, seeing: Seeing) -> None:
    content = [{"type": "image", "image": CAT}, {"type": "text", "text": "a"}, {"type": "image_pil", "image_pil": DOG}]
    (output,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == seeing.says(CAT, "a", DOG)
    with pytest.raises(InvalidRequest, match="content of type 'image_url' is not supported"):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], GREEDY)


def test_images_and_videos_are_placed_at_their_placeholders(llm: LLM) -> None:
    data = {"image": CAT, "video": FRAMES}
    (output,) = llm.generate({"prompt": f"{VIDEO}{IMAGE}x", "multi_modal_data": data}, GREEDY, use_tqdm=False)
    around, of_image, of_video = 2 * 2 + 1, 2 * 4, 2 * 2 * 2  # a token is 8 x 8 pixels, and two frames
    assert len(output.prompt_token_ids) == around + of_image + of_video


@pytest.mark.parametrize(
    ("prompt", "data", "words"),
    [
        (IMAGE * 3, {"image": [CAT] * 3}, "a prompt has 3 images; the limit is 2"),
        (IMAGE, {"image": [CAT, DOG]}, "has places for 1 image, but brings 2 images"),
        ("text", {"image": CAT}, "has places for none"),
        (IMAGE, {"image": "cat.png"}, "image must be PIL images"),
        (VIDEO, {"video": [CAT, DOG]}, "frames of a video must have the same size"),
        (IMAGE, {"audio": b""}, "unknown key 'audio'; use image and video"),
    ],
)
def test_invalid_media_is_rejected_before_running(llm: LLM, prompt: str, data: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        tokens(llm, prompt, data)
