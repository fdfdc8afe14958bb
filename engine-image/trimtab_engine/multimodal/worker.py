"""Decoding and processing in a process that can be killed: `-m trimtab_engine.multimodal.worker`.

Files are untrusted client input, so decoding is isolated. Each call processes one image or one video.
"""

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from trimtab_engine.errors import InvalidRequest
from trimtab_engine.ipc.frames import serve_frames
from trimtab_engine.multimodal.decoding import (
    DecodeLimits,
    Frames,
    decode_base64,
    decode_frame_list,
    decode_image,
    decode_video,
)
from trimtab_engine.multimodal.fixed_resolution import SquareProcessor
from trimtab_engine.multimodal.llama4 import TileProcessor
from trimtab_engine.multimodal.qwen2_5_vl import PatchProcessor
from trimtab_engine.multimodal.video_files import decode_movie, movie_kind

MAX_ADDRESS_BYTES = 2 << 30
MAX_VALUES_BYTES = 200 << 20  # of one item: four times the largest image of the published models
Json = dict[str, Any]
Processor = PatchProcessor | TileProcessor | SquareProcessor
KINDS: dict[str, type[Processor]] = {"tile_size": TileProcessor, "square_size": SquareProcessor}
"""Error marker: a field that no other message has."""


class Processing:
    """One model's processors, and how much a file may be."""

    def __init__(self, image: Processor, video: Processor, limits: DecodeLimits) -> None:
        self._processors = {"image": image, "video": video}
        self._limits = limits

    def answer(self, request: Json) -> Json:
        """{"kind": image or video, and one of "data", "base64", "frames"; "mime"} → see `processed`; or
        {"refused": why}.
        """
        try:
            return processed(self._decoded(request), self._processors[request["kind"]])
        except InvalidRequest as error:
            return {"refused": str(error)}

    def _decoded(self, request: Json) -> Frames:
        if "frames" in request:
            return decode_frame_list(request["frames"], self._limits)
        data = request["data"] if "data" in request else decode_base64(request["base64"], self._limits)
        if request["kind"] == "image":
            return decode_image(data, request.get("mime"), self._limits)
        decode = decode_video if movie_kind(data) is None else decode_movie
        return decode(data, request.get("mime"), self._limits)


def processed(frames: Frames, processor: Processor) -> Json:
    """Return patch rows and metadata: {"grid", "num_tokens", "row_size", "values", "seconds", "tiles"}.

    Raises:
        InvalidRequest: there are too many patches.
    """
    first = frames.pictures[0]
    grid = processor.grid(len(frames.pictures), first.height, first.width)
    if math.prod(grid) * processor.row_size > MAX_VALUES_BYTES:
        raise InvalidRequest(f"it makes {math.prod(grid)} patches, more than are sent on; send smaller or fewer frames")
    rows = processor.rows(frames.pictures)
    return {
        "grid": list(grid),
        "num_tokens": processor.num_tokens(grid),
        "row_size": processor.row_size,
        "values": rows.tobytes(),
        "seconds": processor.frames_per_patch / frames.fps,
        "tiles": processor.tiles(first.height, first.width),
    }


def settings(image: Processor, video: Processor, limits: DecodeLimits) -> Json:
    """Start parameters of the process."""
    return {"image": asdict(image), "video": asdict(video), "limits": asdict(limits)}


def start(given: Json) -> Callable[[Json], Json]:
    image, video = (_processor(given[kind]) for kind in ("image", "video"))
    return Processing(image, video, DecodeLimits(**given["limits"])).answer


def _processor(fields: Json) -> Processor:
    kind = next((kind for field, kind in KINDS.items() if field in fields), PatchProcessor)
    return kind(**{**fields, "mean": tuple(fields["mean"]), "std": tuple(fields["std"])})


if __name__ == "__main__":
    serve_frames(start, max_address_bytes=MAX_ADDRESS_BYTES)
