"""Images become the numbers that transformers' own image processor makes of them, bit for bit."""

import math
from typing import Any

import numpy as np
import pytest
from media_files import a_picture
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from trimtab_engine.errors import InvalidRequest, ModelError
from trimtab_engine.multimodal.items import Patches
from trimtab_engine.multimodal.patches import as_float32
from trimtab_engine.multimodal.qwen2_5_vl import PatchProcessor

SIZES = [(28, 28), (40, 30), (30, 40), (1, 1), (1, 200), (199, 1), (300, 500), (57, 1000), (42, 42), (14, 70)]
WORDS: dict[str, dict[str, Any]] = {
    "as published": {"min_pixels": 3136, "max_pixels": 12_845_056, "image_processor_type": "Qwen2VLImageProcessor"},
    "small": {"size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 84}},
    "other patches": {
        "patch_size": 8,
        "temporal_patch_size": 3,
        "merge_size": 3,
        "min_pixels": 24 * 24,
        "max_pixels": 96 * 96,
        "image_mean": [0.5, 0.25, 0],
        "image_std": [0.5, 0.1, 2],
    },
}


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS.keys())
@pytest.mark.parametrize("size", SIZES)
def test_rows_and_grid_are_those_of_transformers(words: dict[str, Any], size: tuple[int, int]) -> None:
    picture = a_picture(*size, seed=sum(size))
    processor = PatchProcessor.parse(words, "preprocessor_config.json")
    kept = {name: value for name, value in words.items() if name != "image_processor_type"}
    expected = Qwen2VLImageProcessorPil(**kept)(images=[picture], return_tensors="np")
    grid = processor.grid(1, picture.height, picture.width)
    rows = processor.rows([picture])
    patches = Patches(rows.shape[1], rows.tobytes(), processor.meanings().tobytes())
    assert [list(grid)] == expected["image_grid_thw"].tolist()
    assert patches.is_whole
    assert np.array_equal(as_float32(patches), expected["pixel_values"])
    assert processor.num_tokens(grid) == math.prod(grid) // processor.merge_size**2


def test_odd_video_repeats_the_last_frame() -> None:
    processor = PatchProcessor(min_pixels=28 * 28, max_pixels=28 * 28)
    pictures = [a_picture(28, 28, seed=seed) for seed in range(3)]
    assert processor.grid(3, 28, 28) == (2, 2, 2)
    rows = processor.rows(pictures).reshape(2, 4, 3, 2, 14 * 14)  # [times, patches, channels, frames, pixels]
    for frame, picture in enumerate([*pictures, pictures[2]]):
        alone = processor.rows([picture]).reshape(4, 3, 2, 14 * 14)
        assert np.array_equal(rows[frame // 2, :, :, frame % 2], alone[:, :, 0])


@pytest.mark.parametrize("size", [(201, 1), (1, 30_000)])
def test_a_picture_that_is_too_long_and_thin_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match=f"{size[0]} x {size[1]} pixels; one side may be 200 times the other"):
        PatchProcessor().grid(1, size[1], size[0])


def test_the_area_stays_within_its_bounds() -> None:
    processor = PatchProcessor(min_pixels=56 * 56, max_pixels=28 * 28 * 12)
    for height in range(1, 400, 17):
        for width in range(1, 400, 13):
            if max(height, width) <= 200 * min(height, width):
                tall, wide = processor.size(height, width)
                assert tall % 28 == wide % 28 == 0
                assert 56 * 56 <= tall * wide <= 28 * 28 * 12 or min(tall, wide) == 28


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "'CLIPImageProcessor' is not supported"),
        ({"do_resize": False}, "do_resize is False"),
        ({"resample": 2}, "resample is 2"),
        ({"patch_size": 0}, "patch_size is 0"),
        ({"patch_size": "14"}, "patch_size is '14'"),
        ({"max_pixels": True}, "max_pixels is True"),
        ({"min_pixels": 5000, "max_pixels": 4000}, "min_pixels 5000 and max_pixels 4000"),
        ({"max_pixels": 27 * 27, "min_pixels": 1}, "leave no size"),
        ({"image_mean": [0.5]}, "expected 3 numbers"),
        ({"image_std": [1, 1, float("nan")]}, "image_std is nan"),
        ({"rescale_factor": 0}, "rescale_factor is 0"),
    ],
)
def test_words_that_are_not_understood_are_told(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"^preprocessor_config.json: .*{message}"):
        PatchProcessor.parse(words, "preprocessor_config.json")
