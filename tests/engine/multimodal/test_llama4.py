"""Images become the tiles that transformers' own image processor makes of them."""

import ast
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from media_files import a_picture
from trimtab_engine.errors import ModelError
from trimtab_engine.multimodal.items import Patches
from trimtab_engine.multimodal.llama4 import TileProcessor
from trimtab_engine.multimodal.patches import as_float32

SIZES = [(1, 1), (16, 16), (17, 16), (40, 30), (30, 100), (100, 30), (64, 64), (200, 7), (90, 61), (300, 290)]
"""Height and width, for tiles of 16 pixels."""
PLAIN = TileProcessor(patch_size=4, tile_size=16)


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    """The functions of transformers' image processor that are arithmetic: its module wants torchvision."""
    spec = find_spec("transformers.models.llama4")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "image_processing_llama4.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for function in functions:
        function.decorator_list = []
    space: dict[str, Any] = {"torch": torch, "math": math, "SizeDict": object}
    exec("from collections import defaultdict", space)
    exec(compile(ast.Module([f for f in functions if f.name != "pad_to_best_fit"], []), "theirs", "exec"), space)
    return space


@pytest.mark.parametrize("fills_canvas", [False, True])
@pytest.mark.parametrize("max_tiles", [1, 4, 16])
def test_canvas_and_size_are_those_of_transformers(fills_canvas: bool, max_tiles: int, theirs: dict[str, Any]) -> None:
    processor = TileProcessor(patch_size=4, tile_size=16, max_tiles=max_tiles, fills_canvas=fills_canvas)
    resolutions = torch.tensor(theirs["find_supported_resolutions"](max_tiles, SimpleNamespace(height=16, width=16)))
    fit: Callable[..., Any] = theirs["get_max_res_without_distortion"]
    for height, width in SIZES:
        canvas = theirs["get_best_fit"]((height, width), resolutions, resize_to_max_canvas=fills_canvas).tolist()
        assert [16 * count for count in processor.tiles(height, width)] == canvas
        wanted = canvas
        if not fills_canvas:
            wanted = [min(max(side, 16), most) for side, most in zip((height, width), canvas, strict=True)]
        assert processor.size(height, width) == tuple(max(1, side) for side in fit((height, width), wanted))


@pytest.mark.parametrize("size", SIZES)
def test_tiles_hold_the_pixels_of_transformers(size: tuple[int, int]) -> None:
    """Resized images differ by at most one level of 256: transformers resizes with torch, Trimtab with Pillow."""
    height, width = size
    picture = a_picture(width, height, seed=sum(size))
    rows, columns = PLAIN.tiles(height, width)
    pixels = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1)[None]
    canvas = torch.zeros(1, 3, rows * 16, columns * 16, dtype=torch.uint8)
    tall, wide = PLAIN.size(height, width)
    canvas[:, :, :tall, :wide] = _resized(pixels, (tall, wide))
    tiles = canvas.view(3, rows, 16, columns, 16).permute(1, 3, 0, 2, 4).reshape(-1, 3, 16, 16)
    if len(tiles) > 1:
        tiles = torch.cat([tiles, _resized(pixels, (16, 16))])
    grid, made = PLAIN.grid(1, height, width), PLAIN.rows([picture])
    assert grid == (len(tiles), 4, 4)
    assert made.shape == (math.prod(grid), PLAIN.row_size)
    assert PLAIN.num_tokens(grid) == 4 * len(tiles)
    own = torch.from_numpy(made.astype(np.int16)).view(-1, 2, 2, 2, 2, 3, 4, 4)  # tokens, patches in one, pixels
    own = own.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, 3, 16, 16)
    assert (own - tiles.short()).abs().max() <= 1


def _resized(pixels: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    return pixels if size == tuple(pixels.shape[2:]) else F.interpolate(pixels, size, mode="bilinear", antialias=True)


@pytest.mark.parametrize("words", [{}, {"image_mean": [0.5, 0.25, 0.0], "image_std": [0.5, 0.3, 2.0]}])
def test_values_mean_what_they_do_in_transformers_in_bfloat16(words: dict[str, Any]) -> None:
    processor = TileProcessor.parse(words, "here", patch_size=14)
    mean, std = (torch.tensor(each, dtype=torch.bfloat16)[:, None] for each in (processor.mean, processor.std))
    levels = torch.arange(256, dtype=torch.uint8).to(torch.bfloat16) * processor.rescale_factor
    expected = levels.sub(mean).div_(std).float()
    assert torch.equal(torch.from_numpy(processor.meanings().copy()), expected)
    patches = Patches(3, bytes(3), processor.meanings().tobytes())
    assert as_float32(patches).tolist() == [expected[:, 0].tolist()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"resample": 3}, "resample is 3; only 2"),
        ({"do_normalize": False}, "do_normalize is False"),
        ({"size": {"height": 336, "width": 300}}, "tiles must be square"),
        ({"size": {"height": 340, "width": 340}}, "a multiple of 28 pixels"),
        ({"max_patches": 100}, "max_patches is 100; at most 64"),
        ({"max_patches": 0}, "max_patches is 0"),
        ({"image_std": [0.5]}, "image_std is"),
    ],
)
def test_settings_unsupported_are_rejected(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        TileProcessor.parse(words, "preprocessor_config.json", patch_size=14)


def test_the_published_words_are_understood() -> None:
    words = {
        "image_processor_type": "Llama4ImageProcessorFast", "max_patches": 16, "resize_to_max_canvas": False,
        "size": {"height": 336, "width": 336}, "resample": 2, "rescale_factor": 0.00392156862745098,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "do_resize": True,
    }  # fmt: skip
    processor = TileProcessor.parse(words, "here", patch_size=14)
    assert processor == TileProcessor(patch_size=14, rescale_factor=0.00392156862745098)
    grid = processor.grid(1, 600, 1000)
    assert (grid, processor.num_tokens(grid)) == ((7, 24, 24), 7 * 144)  # 2 x 3 tiles and the whole
