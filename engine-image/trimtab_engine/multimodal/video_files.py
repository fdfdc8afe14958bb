"""Decoding of MP4 and WebM videos to frames with PyAV, which bundles FFmpeg's libraries, if installed. Runs in a
process that can be killed (worker.py).

The first bytes select the demuxer, and no other is allowed: some of FFmpeg's demuxers open files that the content
names. Packets are counted first, without decoding; then frames are decoded up to the last sampled one:

```
frames   0 1 2 3 4 5 6 7 8 9 …    at 8 per second
kept     0       4       8        2 per second, or fewer at even distances, like Qwen2.5-VL's processor
```
"""

import importlib
import io
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from trimtab_engine.errors import InvalidRequest
from trimtab_engine.multimodal.decoding import (
    MOVIES,
    UNKNOWN_FPS,
    DecodeLimits,
    Frames,
    check_mime,
    check_num_bytes,
    check_pixels,
)

PACKAGE = "av"
SIGNATURES = {"video/mp4": (4, b"ftyp"), "video/webm": (0, b"\x1aE\xdf\xa3")}
"""Byte offset and signature."""
ALIASES = {"video/quicktime": "video/mp4", "video/x-m4v": "video/mp4", "video/x-matroska": "video/webm"}
CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4")
"""Supported codecs, by FFmpeg's names."""
FPS, MIN_FRAMES, MULTIPLE = 2.0, 4, 2
"""Sampling: frames per second, minimum number, and the multiple that the number is rounded to."""
DECODED = 4  # factor over the sampled pixels, for frames larger than declared: decoders pad, which counts
TURNS = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}


def movie_kind(data: bytes) -> str | None:
    """Return the container format by the first bytes, or None if unsupported."""
    return next((mime for mime, (at, mark) in SIGNATURES.items() if data[at : at + len(mark)] == mark), None)


def decode_movie(data: bytes, mime: str | None, limits: DecodeLimits) -> Frames:
    """Return some frames of the first video stream in an MP4 or WebM file.

    Raises:
        InvalidRequest: a limit is exceeded, the file is invalid, or PyAV is not installed.
    """
    kind = movie_kind(data)
    assert kind is not None
    check_num_bytes(data, limits)
    check_mime(ALIASES.get(mime or "", mime), kind)
    av = _pyav(kind)
    try:
        with av.open(io.BytesIO(data), format=kind.removeprefix("video/")) as container:
            return _frames(container, limits)
    except (av.error.FFmpegError, ValueError, IndexError) as error:
        raise InvalidRequest(f"it cannot be decoded: {str(error)[:200] or type(error).__name__}") from None


def sampled_frames(num_frames: int, fps: float, most: int) -> list[int]:
    """Return the sampled frame numbers, like transformers' processor of Qwen2-VL with these settings."""
    most = min(most, num_frames) // MULTIPLE * MULTIPLE
    count = math.floor(min(max(num_frames / fps * FPS, MIN_FRAMES), most) / MULTIPLE) * MULTIPLE
    if count == 0:
        return list(range(num_frames))  # one, which transformers does not take
    places = np.arange(count) * (num_frames / count)
    return [int(place) for place in places.astype(np.float32)]  # in which transformers counts


def _frames(container: Any, limits: DecodeLimits) -> Frames:
    if not container.streams.video:
        raise InvalidRequest("it holds no video")
    stream = container.streams.video[0]
    codec = None if stream.codec_context is None else stream.codec_context.name
    if codec not in CODECS:
        raise InvalidRequest(f"it holds {str(codec)[:40]}; decoded are H.264, HEVC, VP8, VP9, AV1 and MPEG-4")
    stream.codec_context.options = {"threads": "1", "max_pixels": str(DECODED * limits.max_pixels)}
    num_frames = _num_frames(container, stream, limits)
    rate = stream.average_rate or stream.guessed_rate
    fps = float(rate) if rate and rate > 0 else UNKNOWN_FPS
    if num_frames / fps > limits.max_seconds:
        raise InvalidRequest(f"it lasts {num_frames / fps:.0f} s; videos of {limits.max_seconds} s at most are read")
    kept = sampled_frames(num_frames, fps, limits.num_frames)
    size = (stream.width, stream.height)
    check_pixels(*size, limits, times=len(kept))
    pictures = list(_pictures(container, stream, frozenset(kept), size))
    if not pictures:
        raise InvalidRequest("it has no frames")
    return Frames(pictures, len(kept) / num_frames * fps)


def _num_frames(container: Any, stream: Any, limits: DecodeLimits) -> int:
    """Return the number of packets to display, independent of the declared number."""
    num_frames = 0
    for packet in container.demux(stream):
        num_frames += packet.size > 0 and not packet.is_discard
        if num_frames > limits.max_movie_frames:
            raise InvalidRequest(f"it has more than {limits.max_movie_frames} frames, which is the most that are read")
    if not num_frames:
        raise InvalidRequest("it has no frames")
    container.seek(0)
    return num_frames


def _pictures(container: Any, stream: Any, kept: frozenset[int], size: tuple[int, int]) -> Iterator[Image.Image]:
    last = max(kept)
    for number, frame in enumerate(container.decode(stream)):
        if (frame.width, frame.height) != size:
            raise InvalidRequest(f"frame {number} has size {(frame.width, frame.height)}, the file declares {size}")
        if number in kept:
            turn = TURNS.get(frame.rotation % 360)
            picture: Image.Image = frame.to_image()
            yield picture if turn is None else picture.transpose(turn)
        if number == last:
            return


def _pyav(kind: str) -> Any:
    try:
        av = importlib.import_module(PACKAGE)
    except ImportError:
        raise InvalidRequest(
            f"it is {kind}, which is decoded by the package {PACKAGE}, not installed in this server (its extra video: "
            f"pip install 'trimtab[video]'); send frames instead, as data:video/jpeg;base64,FRAME,FRAME,…"
        ) from None
    av.logging.set_level(None)  # what FFmpeg finds odd about a file
    return av


assert tuple(SIGNATURES) == MOVIES
