"""A tiny model that sees, made where its engine runs; what is asked of it, and the image that is sent."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

from harness.claims import MOUNT
from harness.target import REPOSITORY

BUILDER = REPOSITORY / "engine-image" / "engine_benchmarks" / "seeing_folder.py"
FOLDER, NAME = "seeing", "seeing"
SIDE = 112  # pixels of the image
NUM_TOKENS = 16  # which the model makes of it: one of 28 x 28 pixels
AROUND = 2  # tokens: where vision begins, and where it ends
MOST_IMAGES = 2


def making() -> str:
    """The script that writes the model, in a pod of the engine's image with the claim at MOUNT."""
    begin = f"python3 - {MOUNT}/{FOLDER} <<'END_OF_BUILDER' && chmod -R a+rX {MOUNT}"
    return f"{begin}\n{BUILDER.read_text()}\nEND_OF_BUILDER\n"


def changes(claim: str) -> dict[str, Any]:
    """Of the sample's spec."""
    return {
        "model": {"uri": f"pvc://{claim}/{FOLDER}", "servedName": NAME},
        "engine": {
            "maxModelLen": 512,
            "limitMmPerPrompt": {"image": MOST_IMAGES, "video": 0},
            "mmProcessorCache": "16Mi",
        },
        "tuning": {"mode": "Off"},
    }


def png(red: int, green: int, blue: int) -> bytes:
    """An image of one colour."""
    row = b"\0" + bytes((red, green, blue)) * SIDE
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(row * SIDE)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )


def message(text: str, *images: bytes) -> dict[str, Any]:
    """What the openai client sends: the images, then the text."""
    urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
