"""Pictures and animations as bytes, whole and broken, for tests."""

import base64
import importlib
import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image


def a_picture(width: int = 40, height: int = 30, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Random pixels, the same for the same seed."""
    channels = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels, mode)


def encoded(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def animated(pictures: Sequence[Image.Image], kind: str = "GIF", milliseconds: int = 500) -> bytes:
    return encoded(pictures[0], kind, save_all=True, append_images=list(pictures[1:]), duration=milliseconds, loop=0)


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{in_base64(data)}"


def a_png_that_says(width: int, height: int, data: bytes = b"") -> bytes:
    """Return a PNG whose header has this size, regardless of its content."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def a_png_of_zeros(width: int, height: int) -> bytes:
    """Return a decompression bomb, a thousandth of its decompressed size."""
    return a_png_that_says(width, height, bytes(height * (1 + 3 * width)))


def a_gif_of(num_frames: int) -> bytes:
    """Return a one-pixel GIF with many frames: 30 bytes per frame and no frame count."""
    frame = b"!\xf9\x04\x00\x0a\x00\x00\x00" + b",\x00\x00\x00\x00\x01\x00\x01\x00\x00" + b"\x02\x02D\x01\x00"
    return b"GIF89a\x01\x00\x01\x00\x80\x00\x00\x00\x00\x00\xff\xff\xff" + frame * num_frames + b";"


def a_movie(
    pictures: Sequence[Image.Image], kind: str = "mp4", codec: str = "libx264", fps: int = 8, **options: str
) -> bytes:
    """Return a video of these images with even sides. Requires PyAV."""
    av: Any = importlib.import_module("av")
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=fps, options=options)
        stream.width, stream.height, stream.pix_fmt = *pictures[0].size, "yuv420p"
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_image(picture)))
        container.mux(stream.encode())
    return file.getvalue()


def a_grey(level: int, width: int = 64, height: int = 48) -> Image.Image:
    """Return a uniform image, which codecs keep nearly unchanged."""
    return Image.new("RGB", (width, height), (level, level, level))
