"""Decoding of image and video files to pixels with Pillow. Runs in a process that can be killed (worker.py): files are
client input and may be crafted to use unlimited time or memory.

Declared sizes are checked before decoding; a file that exceeds its declared size hits the process's resource limits.
"""

import base64
import binascii
import io
import struct
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import GifImagePlugin, Image, ImageOps, ImageSequence, UnidentifiedImageError

from trimtab_engine.errors import InvalidRequest

MIMES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif", "BMP": "image/bmp"}
"""Supported formats: Pillow's names and their MIME types."""
ANIMATED = ("GIF", "WEBP", "PNG")
"""Formats with several frames, which are videos when they are sent as such."""
MOVIES = ("video/mp4", "video/webm")
"""Videos that others than Pillow decode (video_files.py)."""
ALIASES = {
    "image/jpg": "image/jpeg",
    "image/pjpeg": "image/jpeg",
    "image/apng": "image/png",
    "image/x-ms-bmp": "image/bmp",
}
FRAME_LIST = "video/jpeg"
"""A video as JPEG images, in base64 with commas between them: vLLM's form."""
UNKNOWN_FPS = 24.0  # frame rate of files without timestamps: transformers' default
Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Decoding limits. `max_pixels`: of one image, and of all sampled frames of a video, before resizing. `max_frames`:
    frames of an animated image; `num_frames`: number of frames sampled evenly. `max_movie_frames` and `max_seconds`:
    limits of MP4 and WebM.
    """

    max_bytes: int = 32 << 20
    max_pixels: int = 32 << 20
    max_frames: int = 768
    num_frames: int = 32
    max_movie_frames: int = 18_000
    max_seconds: int = 600


@dataclass(frozen=True, slots=True)
class Frames:
    """Images in RGB, one after the other. `fps`: how many of those kept make a second; an image has one image."""

    pictures: Sequence[Image.Image]
    fps: float = UNKNOWN_FPS


def decode_base64(text: str, limits: DecodeLimits) -> bytes:
    """Return the content of a data: URL.

    Raises:
        InvalidRequest: it is not base64, or too long.
    """
    if len(text) // 4 * 3 > limits.max_bytes + 2:
        raise InvalidRequest(f"it has more than {limits.max_bytes} bytes; that is the most of one file")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"its content is no base64: {error}") from None


def decode_image(data: bytes, mime: str | None, limits: DecodeLimits) -> Frames:
    """Return one image, rotated by its EXIF orientation, on white where it is transparent; the first frame of several.

    Raises:
        InvalidRequest: a limit is exceeded or the file is invalid.
    """
    with _opened(data, mime, limits) as image:
        return Frames([in_rgb(image)])


def decode_video(data: bytes, mime: str | None, limits: DecodeLimits) -> Frames:
    """The frames of an animation, evenly spread where it has more than are kept. Raises InvalidRequest."""
    with _opened(data, mime, limits, kinds=ANIMATED) as image:
        if isinstance(image, GifImagePlugin.GifImageFile):
            num_frames = _num_gif_frames(image, limits)
        else:
            num_frames = int(getattr(image, "n_frames", 1))
        _check_num_frames(num_frames, limits)
        kept = sampled_frame_indices(num_frames, limits.num_frames)
        check_pixels(image.width, image.height, limits, times=len(kept))
        return _frames(image, num_frames, frozenset(kept))


def decode_frame_list(texts: Sequence[str], limits: DecodeLimits) -> Frames:
    """The frames that were sent as JPEG images of one size, in base64. Raises InvalidRequest."""
    _check_num_frames(len(texts), limits)
    pictures: list[Image.Image] = []
    num_pixels = 0
    for number in sampled_frame_indices(len(texts), limits.num_frames):
        try:
            picture = decode_image(decode_base64(texts[number], limits), "image/jpeg", limits).pictures[0]
        except InvalidRequest as error:
            raise InvalidRequest(f"frame {number}: {error}") from None
        num_pixels += picture.width * picture.height
        if num_pixels > limits.max_pixels:
            raise InvalidRequest(f"its frames have more than {limits.max_pixels} pixels together; send smaller ones")
        if pictures and picture.size != pictures[0].size:
            raise InvalidRequest(f"frame {number} has size {picture.size}, the first one {pictures[0].size}")
        pictures.append(picture)
    return Frames(pictures)


def sampled_frame_indices(num_frames: int, most: int) -> list[int]:
    """Return the sampled frame numbers: all, or the given number at even distances from first to last."""
    if num_frames <= most:
        return list(range(num_frames))
    return [int(place) for place in np.linspace(0, num_frames - 1, most)]


def _opened(data: bytes, mime: str | None, limits: DecodeLimits, kinds: Sequence[str] = tuple(MIMES)) -> Image.Image:
    """The file, of which nothing is decoded yet."""
    names = ", ".join([*(MIMES[kind] for kind in kinds), *(MOVIES if kinds == ANIMATED else ())])
    check_num_bytes(data, limits)
    Image.MAX_IMAGE_PIXELS = None  # Pillow's own check would warn first; this one runs before any decoding
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Pillow finds odd about a file
            image = Image.open(io.BytesIO(data), formats=list(MIMES))
    except UnidentifiedImageError:
        raise InvalidRequest(f"it is none of {names}") from None
    except (OSError, ValueError, SyntaxError, struct.error, EOFError, IndexError) as error:
        raise InvalidRequest(f"it cannot be read: {_reason(error)}") from None
    found = "JPEG" if image.format == "MPO" else str(image.format)  # several images of a camera, in one JPEG
    if found not in kinds:
        raise InvalidRequest(f"it is {MIMES[found]}; send one of {names}")
    check_mime(ALIASES.get(mime or "", mime), MIMES[found])
    check_pixels(image.width, image.height, limits)
    return image


def check_num_bytes(data: bytes, limits: DecodeLimits) -> None:
    """Raise InvalidRequest for a file that is too long."""
    if len(data) > limits.max_bytes:
        raise InvalidRequest(f"it has {len(data)} bytes; at most {limits.max_bytes} are read of one file")


def check_mime(said: str | None, found: str) -> None:
    """Raise InvalidRequest if the declared type differs from the real one; None if no type is declared."""
    if said is not None and said != found:
        raise InvalidRequest(f"its declared type is {said[:80]}, but it is {found}")


def check_pixels(width: int, height: int, limits: DecodeLimits, times: int = 1) -> None:
    """Raise InvalidRequest for an image, or a number of frames, with no pixels or too many."""
    if min(width, height) < 1 or width * height * times > limits.max_pixels:
        frames = f" in {times} frames" if times > 1 else ""
        raise InvalidRequest(f"it has {width} x {height} pixels{frames}; at most {limits.max_pixels} are decoded")


def _check_num_frames(num_frames: int, limits: DecodeLimits) -> None:
    if num_frames > limits.max_frames:
        raise InvalidRequest(f"it has {num_frames} frames; at most {limits.max_frames} are read")


def _num_gif_frames(image: GifImagePlugin.GifImageFile, limits: DecodeLimits) -> int:
    """Its frames, as far as the limit: a GIF has no number of them, and may go on for long."""
    num_frames = 0
    try:
        for num_frames in range(1, limits.max_frames + 1):
            image.seek(num_frames)
    except EOFError:
        return num_frames
    except (OSError, ValueError, SyntaxError, struct.error, IndexError) as error:
        raise InvalidRequest(f"frame {num_frames} cannot be read: {_reason(error)}") from None
    raise InvalidRequest(f"it has more than {limits.max_frames} frames, which is the most that are read")


def _frames(image: Image.Image, num_frames: int, kept: frozenset[int]) -> Frames:
    pictures: list[Image.Image] = []
    milliseconds = 0.0
    for number, frame in _each_frame(image, num_frames):
        milliseconds += float(frame.info.get("duration", 0) or 0)
        if number in kept:
            pictures.append(in_rgb(frame))
    seconds = milliseconds / 1000
    return Frames(pictures, len(kept) / seconds if seconds > 0 else UNKNOWN_FPS)


def _each_frame(image: Image.Image, num_frames: int) -> Iterator[tuple[int, Image.Image]]:
    frames = ImageSequence.Iterator(image)
    for number in range(num_frames):
        try:
            frame = frames[number]
            frame.load()
        except (OSError, ValueError, SyntaxError, struct.error, EOFError, IndexError) as error:
            raise InvalidRequest(f"frame {number} cannot be read: {_reason(error)}") from None
        yield number, frame


def in_rgb(image: Image.Image) -> Image.Image:
    """Return RGB pixels as transformers computes them: rotated by the EXIF orientation, on white.

    Raises:
        InvalidRequest: the file cannot be read.
    """
    try:
        image.load()
        turned = ImageOps.exif_transpose(image)
        if "A" in turned.getbands() or turned.info.get("transparency") is not None:
            turned = turned.convert("RGBA")
            white = Image.new("RGBA", turned.size, (255, 255, 255, 255))
            return Image.alpha_composite(white, turned).convert("RGB")
        return turned.convert("RGB")
    except (OSError, ValueError, SyntaxError, struct.error, EOFError, IndexError, TypeError) as error:
        raise InvalidRequest(f"it cannot be decoded: {_reason(error)}") from None


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:200]
