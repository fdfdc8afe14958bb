"""A tiny vision model, built in a pod of its engine's image; its spec, requests and images."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

from harness.claims import MOUNT
from harness.target import REPOSITORY

BUILDER = REPOSITORY / "engine-image" / "engine_benchmarks" / "vision_checkpoint.py"
FOLDER, NAME = "seeing", "seeing"
SIDE = 112  # pixels of the image
NUM_TOKENS = 16  # per image: one for each 28 x 28 pixels
DELIMITER_TOKENS = 2  # vision start and vision end
MAX_IMAGES = 2


def build_script() -> str:
    """Return the script that writes the model, for a pod of the engine's image with the claim at MOUNT."""
    begin = f"python3 - {MOUNT}/{FOLDER} <<'END_OF_BUILDER' && chmod -R a+rX {MOUNT}"
    return f"{begin}\n{BUILDER.read_text()}\nEND_OF_BUILDER\n"


def spec_changes(claim: str) -> dict[str, Any]:
    """Return changes to the sample's spec."""
    return {
        "model": {"uri": f"pvc://{claim}/{FOLDER}", "servedName": NAME},
        "engine": {
            "maxModelLen": 512,
            "limitMmPerPrompt": {"image": MAX_IMAGES, "video": 0},
            "mmProcessorCache": "16Mi",
        },
        "tuning": {"mode": "Off"},
    }


def png(red: int, green: int, blue: int) -> bytes:
    """Return a PNG image of one colour."""
    row = b"\0" + bytes((red, green, blue)) * SIDE
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(row * SIDE)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )


def message(text: str, *images: bytes) -> dict[str, Any]:
    """Return a chat message with the images, then the text."""
    urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
