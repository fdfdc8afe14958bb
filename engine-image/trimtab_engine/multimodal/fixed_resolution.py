"""Image processing for vision encoders with fixed-resolution inputs, from the checkpoint's settings: one square for
LLaVA, several for Idefics3, SmolVLM and InternVL.

```
 centre crop, or resized to a square   split: resized to a grid of squares, and a thumbnail
 ┌───┬─────┬───┐                       ┌─────┬─────┐
 │   │  0  │   │                       │  0  │  1  │   and 2: the thumbnail
 └───┴─────┴───┘                       └─────┴─────┘
```
A square is one row of 8-bit values, channel-major; a table converts them to the encoder's input (qwen2_5_vl.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trimtab_engine.errors import ModelError
from trimtab_engine.multimodal.patches import meanings_of
from trimtab_engine.multimodal.processor_settings import MAX_EDGE, channels, edges, flag, number, whole
from trimtab_engine.multimodal.qwen2_5_vl import CLIP_MEAN, CLIP_STD

HALVES = (0.5, 0.5, 0.5)
CUTTING = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
FITTING = ("GotOcr2ImageProcessor",)
SQUEEZING = ("SiglipImageProcessor",)
CROPPING = ("CLIPImageProcessor", "LlavaImageProcessor")
ENDINGS = ("", "Fast", "Pil")
KNOWN_TYPES = tuple(kind + ending for kind in (*CUTTING, *FITTING, *SQUEEZING, *CROPPING) for ending in ENDINGS)
SINGLE_RANK, SHUFFLED = "llava", "internvl"  # model_type
WITH_CLASS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Encoders of LLaVA's kind, and their rows in addition to the patches."""
BICUBIC, LANCZOS = 3, 1  # Pillow's numbers for them, which checkpoints have
UNSAID_EDGE = 224  # pixels: CLIP's default shorter edge
MAX_SQUARES = 256  # of an image
Grid = tuple[int, int, int]
Size = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True, slots=True)
class SquareProcessor:
    """Settings of image processing."""

    square_size: int
    """Pixels along a side."""
    tokens_per_square: int
    shorter_edge: int | None = None
    """Shorter edge of the resized image before the centre crop; keeps the aspect ratio."""
    squeezed: tuple[int, int] | None = None
    """Height and width of the resized image before the centre crop, independent of the aspect ratio. If None and there
    is no shorter edge, the image is resized to the square and not cropped."""
    longer_edge: int | None = None
    """Longest edge of the image that is split into squares; None if it is split differently, or not at all."""
    num_squares: tuple[int, int] | None = None
    """Minimum and maximum number of squares of a split image, with the grid nearest to its aspect ratio; None likewise.
    """
    pads: bool = False
    """True if images are first padded to a square with the mean colour."""
    resample: int = BICUBIC
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    rescale_factor: float = 1 / 255
    frames_per_patch: int = 1

    @classmethod
    def parse(
        cls, words: Mapping[str, Any], where: str, *, square_size: int, tokens_per_square: int
    ) -> "SquareProcessor":
        """Read preprocessor_config.json; config.json gives the encoder's input size.

        Raises:
            ModelError: a setting is not supported.
        """
        kind = _kind(words, where)
        splitting = ("do_image_splitting",) if kind in CUTTING else ()  # do_convert_rgb: images are always RGB
        for step in ("do_resize", "do_rescale", "do_normalize", *splitting):
            if not flag(words, step, True, where):
                raise ModelError(f"{where}: {step} is {words[step]!r}; only true is built")
        crops = kind in CROPPING and flag(words, "do_center_crop", True, where)
        by_default = LANCZOS if kind in CUTTING else BICUBIC
        resample = words.get("resample", by_default)
        if resample not in (BICUBIC, LANCZOS):
            raise ModelError(
                f"{where}: resample is {resample!r}; {BICUBIC} (bicubic) and {LANCZOS} (Lanczos) are built"
            )
        mean, std = (CLIP_MEAN, CLIP_STD) if kind in (*CROPPING, *FITTING) else (HALVES, HALVES)
        found = cls(
            square_size,
            tokens_per_square,
            shorter_edge=_shorter_edge(words, where) if crops else None,
            squeezed=_resized_to_square(words, where) if crops else None,
            longer_edge=_longer_edge(kind, words, square_size, where),
            num_squares=_num_squares(kind, words, where),
            pads=kind == "LlavaImageProcessor" and flag(words, "do_pad", False, where),
            resample=resample,
            mean=channels(words, "image_mean", mean, where),
            std=channels(words, "image_std", std, where),
            rescale_factor=number(words.get("rescale_factor", 1 / 255), "rescale_factor", where),
        )
        found._check_side(kind, words, where, crops=crops)
        return found

    def _check_side(self, kind: str, words: Mapping[str, Any], where: str, *, crops: bool) -> None:
        """Raise unless the processor's squares are the vision encoder's."""
        side = self.square_size
        key = "max_image_size" if kind in CUTTING else "crop_size" if crops else "size"
        built: list[Mapping[str, int]] = [{"height": side, "width": side}]
        if kind in CUTTING:
            built = [{"longest_edge": side}]
        elif crops or kind not in CROPPING:  # to which a size of one number is the shorter edge's
            built.append({"": side})
        if edges(words, key, where) not in built:
            raise ModelError(
                f"{where}: {key} is {words.get(key)!r:.100}; {_written(built)} is needed, since the vision encoder's "
                f"image_size is {side}, and only squares of that size are supported"
            )
        if min(self.squeezed or (self.shorter_edge or side,)) < side:
            raise ModelError(
                f"{where}: size is {words.get('size')!r:.100}; it is smaller than the square of {side} pixels"
            )
        if self.num_squares is not None and not self.num_squares[0] <= self.num_squares[1] < MAX_SQUARES:
            raise ModelError(
                f"{where}: min_patches {self.num_squares[0]} and max_patches {self.num_squares[1]} leave no number of "
                f"squares below {MAX_SQUARES}"
            )
        if self.longer_edge is not None and self._most_squares() > MAX_SQUARES:
            raise ModelError(
                f"{where}: size is {words.get('size')!r:.100}, which makes up to {self._most_squares()} squares of "
                f"{self.square_size} pixels; at most {MAX_SQUARES} are built"
            )

    def _most_squares(self) -> int:
        return math.ceil((self.longer_edge or self.square_size) / self.square_size) ** 2 + 1

    @property
    def row_size(self) -> int:
        """Values per square."""
        return len(self.mean) * self.square_size**2

    def tiles(self, height: int, width: int) -> Size | None:
        """Return rows and columns of squares for an image of this size, or None if images are never split."""
        if self.num_squares is not None:
            return self._nearest_shape(height, width)
        if self.longer_edge is None:
            return None
        tall, wide = self._cut_size(*self._first_size(height, width))
        return tall // self.square_size, wide // self.square_size

    def _nearest_shape(self, height: int, width: int) -> Size:
        """Return the grid nearest to the image's aspect ratio; of equally near ones the largest that has less than
        twice the image's pixels. Grids are ordered as in transformers, which takes the first of equals.
        """
        assert self.num_squares is not None
        few, many = self.num_squares
        shapes = [
            (wide, tall) for wide in range(1, many + 1) for tall in range(1, many + 1) if few <= wide * tall <= many
        ]
        best, nearest = (1, 1), math.inf
        for wide, tall in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
            distance = abs(width / height - wide / tall)
            has_enough = height * width > 0.5 * self.square_size**2 * wide * tall
            if distance < nearest or (distance == nearest and has_enough):
                best, nearest = (tall, wide), distance
        return best

    def _first_size(self, height: int, width: int) -> Size:
        """The longer edge as it shall be, the other even and in proportion."""
        assert self.longer_edge is not None
        ratio = width / height
        if width >= height:
            short = int(self.longer_edge / ratio)
            return max(short + short % 2, 1), self.longer_edge
        short = int(self.longer_edge * ratio)
        return self.longer_edge, max(short + short % 2, 1)

    def _cut_size(self, height: int, width: int) -> Size:
        """Both edges as multiples of a square's."""
        ratio, side = width / height, self.square_size
        if width >= height:
            wide = math.ceil(width / side) * side
            return math.ceil(int(wide / ratio) / side) * side, wide
        tall = math.ceil(height / side) * side
        return tall, math.ceil(int(tall * ratio) / side) * side

    def grid(self, num_frames: int, height: int, width: int) -> Grid:
        """FixedResolution of an image of this size, the whole image among them."""
        rows, columns = self.tiles(height, width) or (1, 1)
        return num_frames * (rows * columns + (rows * columns > 1)), 1, 1

    def num_tokens(self, grid: Grid) -> int:
        """Rows of embeddings of all squares."""
        return grid[0] * self.tokens_per_square

    def rows(self, pictures: Sequence[Image.Image]) -> NDArray[np.uint8]:
        """One RGB image -> [num_squares, channels * square * square] uint8."""
        (picture,) = pictures
        if self.num_squares is not None:
            squares = self._fitted(picture)
        else:
            squares = self._cut(picture) if self.longer_edge is not None else [self._one_square(picture)]
        pixels = np.stack([np.asarray(square) for square in squares])
        return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)).reshape(len(squares), -1)

    def _fitted(self, picture: Image.Image) -> list[Image.Image]:
        side = self.square_size
        rows, columns = self._nearest_shape(picture.height, picture.width)
        squares = self._squares_of(self._resized(picture, (rows * side, columns * side)))
        return squares if len(squares) == 1 else [*squares, self._resized(picture, (side, side))]

    def _squares_of(self, picture: Image.Image) -> list[Image.Image]:
        """Row by row."""
        side = self.square_size
        corners = [(x, y) for y in range(0, picture.height, side) for x in range(0, picture.width, side)]
        return [picture.crop((x, y, x + side, y + side)) for x, y in corners]

    def _cut(self, picture: Image.Image) -> list[Image.Image]:
        side = self.square_size
        picture = self._resized(picture, self._first_size(picture.height, picture.width))
        picture = self._resized(picture, self._cut_size(picture.height, picture.width))
        squares = self._squares_of(picture)
        return squares if len(squares) == 1 else [*squares, self._resized(picture, (side, side))]

    def _one_square(self, picture: Image.Image) -> Image.Image:
        side = self.square_size
        if self.pads:
            picture = self._padded(picture)
        if self.shorter_edge is None:
            size = self.squeezed or (side, side)
        else:
            size = self._by_shorter_edge(picture.height, picture.width)
        picture = self._resized(picture, size)
        left, top = (picture.width - side) // 2, (picture.height - side) // 2
        return picture.crop((left, top, left + side, top + side))

    def _by_shorter_edge(self, height: int, width: int) -> Size:
        assert self.shorter_edge is not None
        short, long = min(height, width), max(height, width)
        longer = int(self.shorter_edge * long / short)
        return (longer, self.shorter_edge) if height > width else (self.shorter_edge, longer)

    def _padded(self, picture: Image.Image) -> Image.Image:
        side = max(picture.size)
        colour = tuple(int(mean * 255) for mean in self.mean)
        square = Image.new("RGB", (side, side), (colour[0], colour[1], colour[2]))
        square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
        return square

    def _resized(self, picture: Image.Image, size: Size) -> Image.Image:
        return picture.resize((size[1], size[0]), resample=Image.Resampling(self.resample))

    def meanings(self) -> NDArray[np.float32]:
        """Return [channels, 256] float32: the encoder's input for each 8-bit value, bit-identical to transformers."""
        return meanings_of(self.mean, self.std, self.rescale_factor)


def square_of(config: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Pixels along a side of the vision encoder's squares, and the tokens that become of one. Raises ModelError."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise ModelError(f"{where}: vision_config must be an object ({vision!r:.100})")
    inside = f"{where}: vision_config"
    side, patch = (side_of(vision, name, inside) for name in ("image_size", "patch_size"))
    if side > MAX_EDGE:
        raise ModelError(f"{inside}: image_size is {side}; squares of at most {MAX_EDGE} pixels are supported")
    along = side // patch
    if config.get("model_type") == SHUFFLED:
        return side, _shuffled(config, along, where) ** 2
    if not is_single_square(config):
        factor = whole(config, "scale_factor", 2, where)
        if along < 1 or along % factor:
            raise ModelError(f"{where}: {along} patches along a square's side are no multiple of scale_factor {factor}")
        return side, (along // factor) ** 2
    kind, strategy = str(vision.get("model_type")), config.get("vision_feature_select_strategy", "default")
    if kind not in WITH_CLASS:
        raise ModelError(f"{inside}: model_type {kind!r} is not supported; supported are {', '.join(WITH_CLASS)}")
    if strategy not in ("default", "full"):
        raise ModelError(f"{where}: vision_feature_select_strategy is {strategy!r}; supported are default and full")
    return side, along**2 + WITH_CLASS[kind] - (strategy == "default")


def _shuffled(config: Mapping[str, Any], along: int, where: str) -> int:
    """Tokens along a side of InternVL's square."""
    strategy = config.get("vision_feature_select_strategy", "default")
    factor = 1 / number(config.get("downsample_ratio", 0.5), "downsample_ratio", where)
    if strategy != "default" or factor < 1 or not factor.is_integer() or along < 1 or along % int(factor):
        raise ModelError(
            f"{where}: {along} patches along a square's side, downsample_ratio {1 / factor:g} and "
            f"vision_feature_select_strategy {strategy!r} are not supported; the first must be a multiple of 1 / the "
            f"second, the third default"
        )
    return along // int(factor)


def is_single_square(config: Mapping[str, Any]) -> bool:
    """Return True if an image is one square without delimiters."""
    return config.get("model_type") == SINGLE_RANK


def side_of(words: Mapping[str, Any], name: str, where: str) -> int:
    """Return the side in pixels from a number or an object of equal edges.

    Raises:
        ModelError: the value is missing or not square.
    """
    said = words.get(name)
    if said is None:
        raise ModelError(f"{where}: {name} is missing; a side length in pixels is needed")
    if isinstance(said, list | tuple) and said and all(each == said[0] for each in said):
        said = said[0]
    return whole({name: said}, name, 1, where)


def _kind(words: Mapping[str, Any], where: str) -> str:
    """Return the processor's name without the suffix of transformers' implementation."""
    said = words.get("image_processor_type")
    if said not in KNOWN_TYPES:
        raise ModelError(
            f"{where}: image_processor_type {said!r} is not supported; supported are "
            f"{', '.join((*CROPPING, *SQUEEZING, *CUTTING, *FITTING))}"
        )
    return next(kind for kind in (*CUTTING, *FITTING, *SQUEEZING, *CROPPING) if str(said).startswith(kind))


def _written(built: Sequence[Mapping[str, int]]) -> str:
    """Return the text of edges for messages."""
    return " or ".join(str(each.get("", dict(each))) for each in built)


def _shorter_edge(words: Mapping[str, Any], where: str) -> int | None:
    """Return the shorter edge before the centre crop, or None if `size` has both edges."""
    size = edges(words, "size", where) or {"": UNSAID_EDGE}
    if size.keys() == {"height", "width"}:
        return None
    if size.keys() not in ({""}, {"shortest_edge"}):
        raise ModelError(
            f"{where}: size is {words['size']!r:.100}; supported are only shortest_edge, or height and width"
        )
    return next(iter(size.values()))


def _resized_to_square(words: Mapping[str, Any], where: str) -> Size | None:
    """Height and width before the middle is taken; None: `size` has a shorter edge."""
    size = edges(words, "size", where)
    return (size["height"], size["width"]) if size.keys() == {"height", "width"} else None


def _longer_edge(kind: str, words: Mapping[str, Any], square_size: int, where: str) -> int | None:
    if kind not in CUTTING:
        return None
    size = edges(words, "size", where) or {"longest_edge": 4 * square_size}
    if size.keys() != {"longest_edge"}:
        raise ModelError(f"{where}: size is {words['size']!r:.100}; only longest_edge is supported")
    return size["longest_edge"]


def _num_squares(kind: str, words: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    if kind not in FITTING:
        return None
    return whole(words, "min_patches", 1, where), whole(words, "max_patches", 12, where)
