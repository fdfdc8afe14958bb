"""Images become the squares that transformers' own image processors make of them, and prompts have the tokens that
its processors write around them.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from media_files import a_picture
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string
from trimtab_engine.errors import InvalidRequest, ModelError
from trimtab_engine.multimodal.checkpoint import FRAME_WORDS, SQUARE_WORDS, read_processors, read_tile_tokens
from trimtab_engine.multimodal.fixed_resolution import SquareProcessor, square_of
from trimtab_engine.multimodal.items import MultiModalItem, Patches
from trimtab_engine.multimodal.patches import as_float32
from trimtab_engine.multimodal.placeholders import expand
from trimtab_engine.multimodal.tiles import Idefics3Tokens, InternVLTokens

SIDE, TOKENS = 16, 4
SIZES = [(1, 1), (16, 16), (17, 16), (40, 30), (30, 100), (100, 30), (64, 64), (200, 7), (90, 61), (61, 90), (33, 31)]
"""Width and height."""
CROPPED = {"size": {"shortest_edge": 20}, "crop_size": {"height": SIDE, "width": SIDE}}
CUT = {"size": {"longest_edge": 50}, "max_image_size": {"longest_edge": SIDE}}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "CLIPImageProcessor": (CLIPImageProcessorPil, CROPPED),
    "CLIPImageProcessorFast": (
        CLIPImageProcessorPil, {"do_center_crop": False, "size": {"height": SIDE, "width": SIDE}, "resample": 1},
    ),
    "CLIPImageProcessorPil": (CLIPImageProcessorPil, CROPPED | {"size": {"height": 20, "width": 27}}),
    "LlavaImageProcessor": (LlavaImageProcessorPil, CROPPED | {"do_pad": True, "size": {"shortest_edge": SIDE}}),
    "SiglipImageProcessor": (SiglipImageProcessorPil, {"size": {"height": SIDE, "width": SIDE}}),
    "Idefics3ImageProcessor": (Idefics3ImageProcessorPil, CUT | {"image_mean": [0.1, 0.2, 0.3]}),
    "GotOcr2ImageProcessorFast": (
        GotOcr2ImageProcessorPil,
        {"crop_to_patches": True, "max_patches": 7, "size": {"height": SIDE, "width": SIDE}},
    ),
    "SmolVLMImageProcessorPil": (SmolVLMImageProcessorPil, CUT),
}  # fmt: skip


def parsed(words: dict[str, Any]) -> SquareProcessor:
    return SquareProcessor.parse(words, "here", square_size=SIDE, tokens_per_square=TOKENS)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", list(KINDS))
def test_squares_are_those_of_transformers_bit_for_bit(kind: str, size: tuple[int, int]) -> None:
    theirs, words = KINDS[kind]
    processor = parsed(words | {"image_processor_type": kind})
    picture = a_picture(*size, seed=3)
    made = theirs(**words)(images=[picture], return_tensors="np")["pixel_values"].reshape(-1, 3, SIDE, SIDE)
    rows = processor.rows([picture])
    patches = Patches(processor.row_size, rows.tobytes(), processor.meanings().tobytes())
    grid = processor.grid(1, picture.height, picture.width)
    assert (grid, processor.num_tokens(grid)) == ((len(made), 1, 1), len(made) * TOKENS)
    assert np.array_equal(as_float32(patches).reshape(-1, 3, SIDE, SIDE), made)


SQUARE_IDS = {word: 300 + number for number, word in enumerate(SQUARE_WORDS.values())}
PLACES = {f"<row_{row}_col_{column}>": 320 + row * 4 + column for row in (1, 2, 3) for column in (1, 2)}
SMOL = {
    "model_type": "smolvlm", "scale_factor": 2,
    "vision_config": {"image_size": SIDE, "patch_size": 4},
}  # fmt: skip


def a_checkpoint(folder: Path, tokenizer_folder: Path, config: dict[str, Any] = SMOL) -> str:
    """Write a server's files of a checkpoint without weights, with a byte tokenizer."""
    (folder / "config.json").write_text(json.dumps(config))
    kind = {"image_processor_type": "SmolVLMImageProcessor", **CUT}
    (folder / "preprocessor_config.json").write_text(json.dumps(kind))
    words = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    words["added_tokens"] += [{"id": number, "content": word, **token} for word, number in _added().items()]
    (folder / "tokenizer.json").write_text(json.dumps(words))
    return str(folder)


def _added() -> dict[str, int]:
    return SQUARE_IDS | PLACES


def a_picture_of(rows: int, columns: int) -> MultiModalItem:
    count = rows * columns + (rows * columns > 1)
    patches = Patches(3, bytes(3 * count), bytes(3 * 1024))
    return MultiModalItem("image", b"name", count * TOKENS, (count, 1, 1), patches, tiles=(rows, columns))


@pytest.mark.parametrize("tiles", [(1, 1), (1, 2), (2, 1), (3, 2)])
def test_tokens_around_squares_are_those_of_transformers(
    tiles: tuple[int, int], tmp_path: Path, tokenizer_folder: Path
) -> None:
    folder = a_checkpoint(tmp_path, tokenizer_folder)
    tokens = read_tile_tokens(folder, read_processors(folder))
    assert isinstance(tokens, Idefics3Tokens)
    fence, whole, picture = SQUARE_WORDS.values()
    rows, columns = (0, 0) if tiles == (1, 1) else tiles
    written: Any = get_image_prompt_string
    said = written(rows, columns, TOKENS, fence, picture, whole).replace("\n", "10 ")
    for word, number in _added().items():
        said = said.replace(word, f"{number} ")
    expanded, spans = expand(*tokens.written([5, tokens.picture, 7], [a_picture_of(*tiles)]), {"image": tokens.picture})
    assert expanded == [5, *map(int, said.split()), 7]
    assert len(spans) == (1 if tiles == (1, 1) else tiles[0] * tiles[1] + 1)


def test_a_place_without_a_name_and_a_tokenizer_without_the_words_are_told(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    folder = a_checkpoint(tmp_path, tokenizer_folder)
    tokens = read_tile_tokens(folder, read_processors(folder))
    assert tokens is not None
    with pytest.raises(InvalidRequest, match="no name for row 1, column 3"):
        tokens.written([tokens.picture], [a_picture_of(1, 3)])
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": []}))
    with pytest.raises(ModelError, match="has no token <fake_token_around_image>"):
        read_tile_tokens(folder, read_processors(folder))


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (None, "has no token <fake_token_around_image>"),
        ({"<image>": 3}, "added_tokens is {'<image>': 3}; a list is needed"),
        (["<image>"], "added_tokens has '<image>'; objects with content and id are needed"),
        ([{"id": 9}], "added_tokens has {'id': 9}; objects"),
        ([{"id": "9", "content": "<image>"}], "objects with content and id"),
        (
            [{"id": number, "content": word} for word, number in SQUARE_IDS.items()],
            r"tokenizer\.json cannot be read as a tokenizer: .*; fetch it again",
        ),
    ],
)
def test_tokens_that_cannot_be_read_are_told_by_the_file_and_the_key(
    tokens: object, words: str, tmp_path: Path, tokenizer_folder: Path
) -> None:
    folder = a_checkpoint(tmp_path, tokenizer_folder)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    with pytest.raises(ModelError, match=words):
        read_tile_tokens(folder, read_processors(folder))


LLAVA: dict[str, Any] = {
    "model_type": "llava",
    "vision_config": {"model_type": "clip_vision_model", "image_size": 30, "patch_size": 7},
}


INTERN: dict[str, Any] = {
    "model_type": "internvl",
    "vision_config": {"image_size": [24, 24], "patch_size": [4, 4]},
}


def test_intern_vl_writes_its_squares_between_two_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(INTERN))
    kind = {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 24, "width": 24}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(kind))
    ids = {"start": 7, "end": 8, "picture": 9}
    added = [{"id": ids[name], "content": word} for name, word in FRAME_WORDS.items()]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    tokens = read_tile_tokens(str(tmp_path), read_processors(str(tmp_path)))
    assert tokens == InternVLTokens(**ids)
    assert tokens.written([1, 9, 2], [a_picture_of(2, 1)])[0] == [1, 7, 9, 9, 9, 8, 2]
    assert tokens.written([9], [a_picture_of(1, 1)])[0] == [7, 9, 8]


@pytest.mark.parametrize(
    ("config", "num_tokens"),
    [
        (LLAVA, 16),
        (LLAVA | {"vision_feature_select_strategy": "full"}, 17),
        ({**LLAVA, "vision_config": LLAVA["vision_config"] | {"model_type": "siglip_vision_model"}}, 15),
        (SMOL, 4),
        (INTERN, 9),
    ],
)
def test_tokens_of_a_square_are_counted(config: dict[str, Any], num_tokens: int) -> None:
    assert square_of(config, "here")[1] == num_tokens


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**LLAVA, "vision_config": {"model_type": "pixtral", "image_size": 30, "patch_size": 7}}, "'pixtral' is not"),
        ({**LLAVA, "vision_config": {"patch_size": 7}}, "image_size is missing"),
        (LLAVA | {"vision_feature_select_strategy": "best"}, "vision_feature_select_strategy is 'best'"),
        (INTERN | {"downsample_ratio": 0.3}, "downsample_ratio 0.3"),
        (INTERN | {"downsample_ratio": -0.5}, "downsample_ratio -0.5"),
        (INTERN | {"downsample_ratio": 10**400}, "downsample_ratio is 1000"),
        ({**LLAVA, "vision_config": LLAVA["vision_config"] | {"image_size": [[1], [2]]}}, "image_size is"),
        ({**LLAVA, "vision_config": LLAVA["vision_config"] | {"image_size": []}}, r"image_size is \[\]"),
        ({**LLAVA, "vision_config": LLAVA["vision_config"] | {"image_size": 10**9}}, "squares of at most 4096 pixels"),
        ({**LLAVA, "vision_config": LLAVA["vision_config"] | {"model_type": ["x"]}}, r"\['x'\]\" is not supported"),
        (INTERN | {"vision_feature_select_strategy": "full"}, "'full' are not supported"),
        (SMOL | {"scale_factor": 3}, "no multiple of scale_factor 3"),
        ({"model_type": "llava"}, r"vision_config must be an object \(None\)"),
    ],
)
def test_towers_of_another_kind_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        square_of(config, "here")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"image_processor_type": "PixtralImageProcessor"}, "'PixtralImageProcessor' is not supported"),
        ({"do_rescale": False}, "do_rescale is False"),
        ({"resample": 2}, "resample is 2"),
        (
            {
                "image_processor_type": "GotOcr2ImageProcessor",
                "size": {"height": SIDE, "width": SIDE},
                "min_patches": 13,
            },
            "min_patches 13 and max_patches 12 leave no number",
        ),
        ({"do_rescale": None}, "do_rescale is None"),
        ({"do_normalize": "yes"}, "do_normalize is 'yes'; expected true or false"),
        ({"crop_size": {"height": 16, "width": 20}}, "only squares of that size"),
        ({"crop_size": [16, 16]}, r"crop_size is \[16, 16\]; expected a whole number"),
        ({"crop_size": {"height": [16], "width": 16}}, r"crop_size: height is \[16\]; expected a whole number"),
        ({"crop_size": {"shortest_edge": 16}}, "{'height': 16, 'width': 16} or 16 is needed"),
        ({"size": {"shortest_edge": 8}}, "smaller than the square"),
        ({"size": {"height": 20, "width": 8}}, "'width': 8}; it is smaller than the square of 16 pixels"),
        ({"size": {"height": 20}}, "size is {'height': 20}; supported are only shortest_edge, or height and width"),
        ({"size": {"shortest_edge": 20, "longest_edge": 30}}, "supported are only shortest_edge, or height and width"),
        ({"size": [20]}, r"size is \[20\]; expected a whole number"),
        ({"size": True}, "size is True; expected a whole number"),
        ({"size": {"shortest_edge": 10**9}}, "'shortest_edge': 1000000000}; edges of at most 4096 pixels"),
        ({"do_center_crop": None}, "size is {'shortest_edge': 20}; {'height': 16, 'width': 16} is needed"),
        ({"do_center_crop": False, "size": {"shortest_edge": 16}}, "{'height': 16, 'width': 16} is needed"),
        ({"do_center_crop": False, "size": 16}, "size is 16; {'height': 16, 'width': 16} is needed"),
        ({"image_processor_type": "SiglipImageProcessor", "size": {"shortest_edge": 16}}, "'width': 16} or 16 is"),
        ({"rescale_factor": 10**400}, "rescale_factor is 1000000000.*from 1e-06 to 1e\\+06"),
        ({"rescale_factor": 1e300}, "rescale_factor is 1e\\+300; expected a number other than 0"),
        ({"rescale_factor": float("nan")}, "rescale_factor is nan"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std is 0; expected a number other than 0"),
        ({"image_mean": 0.5}, "image_mean is 0.5; expected 3 numbers"),
        (
            CUT | {"image_processor_type": "SmolVLMImageProcessor", "max_image_size": {"longest_edge": [SIDE]}},
            r"max_image_size: longest_edge is \[16\]",
        ),
        (
            CUT | {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": [50]}},
            r"size: longest_edge is \[50\]",
        ),
        (
            CUT | {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 50, "height": 3}},
            "only longest_edge is supported",
        ),
        (CUT | {"image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": False}, "do_image_splitting"),
        (
            CUT | {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 5000}},
            "edges of at most 4096 pixels",
        ),
    ],
)
def test_processors_of_another_kind_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        parsed({"image_processor_type": "CLIPImageProcessor", **CROPPED, **change})
