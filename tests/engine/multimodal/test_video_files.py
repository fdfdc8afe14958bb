"""MP4 and WebM become images, or are refused with the limit and the number."""

import dataclasses
import importlib.util
import io
import math
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from media_files import a_grey, a_movie, a_picture, data_url
from PIL import Image
from trimtab_engine.errors import InvalidRequest
from trimtab_engine.ipc.bounded_worker import WorkerLimits
from trimtab_engine.multimodal import video_files
from trimtab_engine.multimodal.decoding import DecodeLimits
from trimtab_engine.multimodal.processor_cache import ProcessorCache
from trimtab_engine.multimodal.qwen2_5_vl import PatchProcessor
from trimtab_engine.multimodal.reader import MediaReader, Processors
from trimtab_engine.multimodal.sources import AllowedSources
from trimtab_engine.multimodal.video_files import decode_movie, movie_kind, sampled_frames

LIMITS = DecodeLimits(max_bytes=1 << 20, max_pixels=100_000, num_frames=8, max_movie_frames=60, max_seconds=6)
NOTHING = b"\0\0\0\x18ftypmp42"
needs_pyav = pytest.mark.skipif(
    importlib.util.find_spec("av") is None, reason="needs PyAV: pip install 'trimtab[video]'"
)


def greys(count: int) -> list[Image.Image]:
    return [a_grey(20 + 200 * number // count) for number in range(count)]


def level(picture: Image.Image) -> int:
    pixel = picture.resize((1, 1)).getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return int(pixel[0])


@pytest.mark.parametrize("fps", [0.5, 7.3, 24.0, 23.976, 30.0, 60.0])
@pytest.mark.parametrize("most", [8, 32, 768])
def test_frames_are_kept_by_the_rule_and_the_rounding_of_qwen2_vl_s_processor(fps: float, most: int) -> None:
    """Reimplemented here, as transformers' module needs torchvision: 2 frames per second, at least 4, an even
    number.
    """
    for total in (*range(2, 200), 977, 1800, 17_999):
        count = min(max(total / fps * 2, 4), math.floor(min(most, total) / 2) * 2, total)
        count = math.floor(count / 2) * 2
        expected = torch.arange(0, total, total / count).int().tolist()[:count]
        assert sampled_frames(total, fps, most) == expected


def test_a_video_of_one_frame_is_that_frame() -> None:
    assert sampled_frames(1, 24.0, 32) == [0]


def test_container_is_detected_by_first_bytes() -> None:
    assert movie_kind(NOTHING) == "video/mp4"
    assert movie_kind(b"\x1aE\xdf\xa3\x9fB\x86") == "video/webm"
    for other in (b"", b"#EXTM3U\nhttp://10.0.0.1/x.ts", b"ffconcat version 1.0", b"RIFF\0\0\0\0AVI ", b"GIF89a"):
        assert movie_kind(other) is None


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_files, "PACKAGE", "no_package_of_this_name")
    with pytest.raises(InvalidRequest, match=r"video/mp4, which is decoded by the package .*\n?pip install 'trimtab\["):
        decode_movie(NOTHING, "video/mp4", LIMITS)


@needs_pyav
@pytest.mark.parametrize(
    ("kind", "codec", "mime"),
    [
        ("mp4", "libx264", "video/mp4"),
        ("mp4", "mpeg4", "video/quicktime"),
        ("webm", "libvpx-vp9", "video/webm"),
        ("webm", "libvpx", None),
    ],
)
def test_a_video_is_two_of_its_frames_a_second(kind: str, codec: str, mime: str | None) -> None:
    pictures = greys(24)
    frames = decode_movie(a_movie(pictures, kind, codec), mime, LIMITS)
    assert frames.fps == pytest.approx(2.0)
    assert [picture.size for picture in frames.pictures] == [(64, 48)] * 6
    expected = [level(pictures[number]) for number in range(0, 24, 4)]
    assert [level(picture) for picture in frames.pictures] == pytest.approx(expected, abs=4)


@needs_pyav
def test_long_video_is_sampled_at_even_distances() -> None:
    pictures = greys(40)
    frames = decode_movie(a_movie(pictures), "video/mp4", LIMITS)
    assert frames.fps == pytest.approx(8 / 5)
    expected = [level(pictures[number]) for number in range(0, 40, 5)]
    assert [level(picture) for picture in frames.pictures] == pytest.approx(expected, abs=4)


@needs_pyav
@pytest.mark.parametrize(
    ("matrix", "turn"),
    [
        ((0, 1, 0, -1, 0, 0), Image.Transpose.ROTATE_270),  # as a phone that is held upright writes it
        ((-1, 0, 0, 0, -1, 0), Image.Transpose.ROTATE_180),
        ((0, -1, 0, 1, 0, 0), Image.Transpose.ROTATE_90),
    ],
)
def test_a_video_is_turned_as_its_camera_says(matrix: tuple[int, ...], turn: Image.Transpose) -> None:
    left_is_white = a_grey(0)
    left_is_white.paste((255, 255, 255), (0, 0, 32, 48))
    data = a_movie([left_is_white] * 8)
    plain = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    at = data.index(plain, data.index(b"tkhd"))
    a, b, u, c, d, v = matrix
    turned = struct.pack(">9i", a << 16, b << 16, u, c << 16, d << 16, v, 0, 0, 1 << 30)
    frames = decode_movie(data[:at] + turned + data[at + len(plain) :], None, LIMITS)
    expected = left_is_white.transpose(turn).resize((2, 2))
    found = frames.pictures[0]
    assert found.size == left_is_white.transpose(turn).size
    pairs = zip(found.resize((2, 2)).convert("L").tobytes(), expected.convert("L").tobytes(), strict=True)
    assert all(abs(own - wanted) < 16 for own, wanted in pairs)


@needs_pyav
@pytest.mark.parametrize(
    ("changes", "mime", "words"),
    [
        ({"max_movie_frames": 23}, None, "more than 23 frames"),
        ({"max_seconds": 2}, None, "lasts 3 s; videos of 2 s at most"),
        ({"max_pixels": 18_431}, None, "64 x 48 pixels in 6 frames; at most 18431"),
        ({"max_bytes": 1000}, None, "bytes; at most 1000"),
        ({}, "video/webm", "declared type is video/webm, but it is video/mp4"),
        ({}, "image/gif", "declared type is image/gif, but it is video/mp4"),
    ],
)
def test_video_over_limits_or_wrong_type_is_rejected(changes: dict[str, int], mime: str | None, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        decode_movie(a_movie(greys(24)), mime, dataclasses.replace(LIMITS, **changes))


@needs_pyav
def test_broken_or_unsupported_video_is_rejected() -> None:
    movie = a_movie(greys(24))
    for broken in (NOTHING, movie[: len(movie) // 2], movie[:40] + bytes(2000), b"\x1aE\xdf\xa3" + bytes(100)):
        with pytest.raises(InvalidRequest, match=r"cannot be decoded|holds no video|no frames"):
            decode_movie(broken, None, LIMITS)
    with pytest.raises(InvalidRequest, match=r"it holds mjpeg; decoded are H\.264"):
        decode_movie(a_movie(greys(8), "mp4", "mjpeg", strict="unofficial"), None, LIMITS)


def a_movie_that_grows(width: int, height: int) -> bytes:
    """VP8, whose frames declare their size; the second frame is larger than the first and than the file's size."""
    av: Any = importlib.import_module("av")
    movies = [a_movie([a_grey(100, *size)], "webm", "libvpx") for size in ((64, 48), (width, height))]
    file = io.BytesIO()
    with av.open(file, "w", format="webm") as made:
        stream = None
        for number, movie in enumerate(movies):
            with av.open(io.BytesIO(movie), format="webm") as container:
                stream = stream or made.add_stream_from_template(container.streams.video[0])
                for packet in container.demux(video=0):
                    if packet.size:
                        packet.pts = packet.dts = 125 * number
                        packet.stream = stream
                        made.mux(packet)
    return file.getvalue()


@needs_pyav
@pytest.mark.parametrize(("size", "words"), [((80, 64), "frame 1 has size"), ((1280, 720), "cannot be decoded")])
def test_a_frame_that_is_larger_than_the_file_says_is_refused(size: tuple[int, int], words: str) -> None:
    """A far larger one before it is decoded."""
    with pytest.raises(InvalidRequest, match=words):
        decode_movie(a_movie_that_grows(*size), None, LIMITS)


@needs_pyav
@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_video_is_decoded_or_refused_and_nothing_else(seed: int) -> None:
    movie = bytearray(a_movie([a_picture(64, 48, seed=number) for number in range(12)]))
    dice = torch.Generator().manual_seed(seed)
    for place in torch.randint(40, len(movie), (30,), generator=dice).tolist():
        movie[place] ^= 0xFF
    try:
        frames = decode_movie(bytes(movie), None, LIMITS)
    except InvalidRequest:
        return
    assert 0 < len(frames.pictures) <= LIMITS.num_frames


PROCESSOR = PatchProcessor(min_pixels=28 * 28, max_pixels=56 * 56)


@pytest.fixture
async def reader() -> AsyncIterator[MediaReader]:
    workers = WorkerLimits(seconds=60.0, max_workers=1, max_waiting=16)  # a loaded machine takes its time
    made = MediaReader(
        Processors(PROCESSOR, PROCESSOR), AllowedSources(), ProcessorCache(1 << 20), limits=LIMITS, workers=workers
    )
    yield made
    await made.close()


@needs_pyav
async def test_a_video_that_is_sent_becomes_an_item_in_its_time(reader: MediaReader) -> None:
    item = await reader.item("video", data_url(a_movie(greys(24)), "video/mp4"), "")
    assert (item.modality, item.grid, item.seconds_per_step) == ("video", (3, 4, 4), 1.0)
    with pytest.raises(InvalidRequest, match="none of image/png"):
        await reader.item("image", data_url(a_movie(greys(8)), "video/mp4"), "")


async def test_a_video_that_cannot_be_decoded_is_a_reason(reader: MediaReader) -> None:
    with pytest.raises(InvalidRequest, match="decoded"):
        await reader.item("video", data_url(NOTHING, "video/mp4"), "")
