"""Files become pixels, or are refused with the limit and the number; nothing large is decoded before it is judged."""

import dataclasses
import io
import time
from collections.abc import Callable

import numpy as np
import pytest
from media_files import a_gif_of, a_picture, a_png_of_zeros, a_png_that_says, animated, encoded, in_base64
from PIL import Image
from trimtab_engine.errors import InvalidRequest
from trimtab_engine.multimodal.decoding import (
    DecodeLimits,
    Frames,
    decode_base64,
    decode_frame_list,
    decode_image,
    decode_video,
    sampled_frame_indices,
)

LIMITS = DecodeLimits(max_bytes=1 << 20, max_pixels=10_000, max_frames=8, num_frames=4)


def only(frames: Frames) -> Image.Image:
    (picture,) = frames.pictures
    return picture


def same(left: Image.Image, right: Image.Image) -> bool:
    return left.mode == right.mode and np.array_equal(np.asarray(left), np.asarray(right))


@pytest.mark.parametrize(
    ("kind", "mime", "options"),
    [("PNG", "image/png", {}), ("WEBP", "image/webp", {"lossless": True}), ("BMP", "image/bmp", {}), ("PNG", None, {})],
)
def test_formats_without_loss_give_the_pixels_that_went_in(
    kind: str, mime: str | None, options: dict[str, bool]
) -> None:
    picture = a_picture()
    assert same(only(decode_image(encoded(picture, kind, **options), mime, LIMITS)), picture)


def test_a_jpeg_may_be_called_jpg() -> None:
    data = encoded(a_picture(), "JPEG")
    assert same(only(decode_image(data, "image/jpg", LIMITS)), only(decode_image(data, "image/jpeg", LIMITS)))


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA"])
def test_every_mode_becomes_rgb_on_white_where_it_is_transparent(mode: str) -> None:
    picture = a_picture(mode=mode)
    white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
    expected = Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB")
    assert same(only(decode_image(encoded(picture), "image/png", LIMITS)), expected)


def test_a_photograph_is_turned_as_its_camera_says() -> None:
    picture, exif = a_picture(), Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    turned = only(decode_image(encoded(picture, exif=exif.tobytes()), "image/png", LIMITS))
    assert same(turned, picture.transpose(Image.Transpose.ROTATE_270))


def test_an_animation_sent_as_an_image_is_its_first_frame() -> None:
    pictures = [a_picture(seed=seed).quantize(16).convert("RGB") for seed in range(3)]
    assert same(only(decode_image(animated(pictures, "PNG"), "image/png", LIMITS)), pictures[0])


@pytest.mark.usefixtures("frozen_gc")
def test_a_gif_without_end_sent_as_an_image_costs_one_frame() -> None:
    data = a_gif_of(30_000)
    started = time.thread_time()
    assert only(decode_image(data, "image/gif", LIMITS)).size == (1, 1)
    assert time.thread_time() - started < 0.5


@pytest.mark.usefixtures("frozen_gc")
@pytest.mark.parametrize(
    ("data", "mime", "words"),
    [
        (b"", None, "none of image/png, image/jpeg, image/webp, image/gif, image/bmp"),
        (b"not an image", "image/png", "none of"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml", "none of"),
        (b"%PDF-1.7", "application/pdf", "none of"),
        (encoded(a_picture(), "TIFF"), None, "none of"),
        (encoded(a_picture(), "ICO"), None, "none of"),
        (encoded(a_picture(), "PPM"), None, "none of"),
        (encoded(a_picture()), "image/jpeg", "declared type is image/jpeg, but it is image/png"),
        (encoded(a_picture()), "text/html", "declared type is text/html"),
        (encoded(a_picture())[:-40], "image/png", "cannot be decoded"),
        (encoded(a_picture(), "JPEG")[:300], "image/jpeg", "cannot be (read|decoded)"),
        (encoded(a_picture(), "WEBP")[:100], "image/webp", "cannot be (read|decoded)|none of"),
        (a_png_that_says(10_000, 10_000), "image/png", "10000 x 10000 pixels; at most 10000 are decoded"),
        (a_png_that_says(0, 5), "image/png", "cannot be|0 x 5 pixels|none of"),
        (a_png_that_says(2**31 - 1, 2**31 - 1), "image/png", "at most 10000 are decoded|cannot be"),
        (a_png_of_zeros(5000, 5000), "image/png", "5000 x 5000 pixels"),
        (bytes(2 << 20), None, "2097152 bytes; at most 1048576"),
    ],
)
def test_invalid_or_oversized_image_is_rejected_before_decoding(data: bytes, mime: str | None, words: str) -> None:
    started = time.thread_time()
    with pytest.raises(InvalidRequest, match=words):
        decode_image(data, mime, LIMITS)
    assert time.thread_time() - started < 0.5


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_sent_as_a_video_is_its_frames_in_their_time(kind: str) -> None:
    pictures = [a_picture(seed=seed) for seed in range(3)]
    frames = decode_video(animated(pictures, kind, milliseconds=250), None, LIMITS)
    assert len(frames.pictures) == 3
    assert frames.fps == pytest.approx(4.0)
    if kind == "PNG":
        assert all(map(same, frames.pictures, pictures))


def test_frames_are_sampled_at_even_distances() -> None:
    pictures = [a_picture(seed=seed) for seed in range(7)]
    frames = decode_video(animated(pictures, "PNG", milliseconds=100), None, LIMITS)
    assert all(map(same, frames.pictures, [pictures[0], pictures[2], pictures[4], pictures[6]]))
    assert frames.fps == pytest.approx(4 / 0.7)


def test_the_first_and_the_last_frame_are_always_kept() -> None:
    assert sampled_frame_indices(3, 4) == [0, 1, 2]
    assert sampled_frame_indices(100, 4) == [0, 33, 66, 99]


@pytest.mark.usefixtures("frozen_gc")
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (a_gif_of(9), "more than 8 frames"),
        (a_gif_of(30_000), "more than 8 frames"),
        (animated([a_picture(seed=seed) for seed in range(9)], "WEBP"), "9 frames; at most 8"),
        (animated([a_picture(60, 60, seed=seed) for seed in range(4)], "PNG"), "60 x 60 pixels in 4 frames"),
        (encoded(a_picture(), "JPEG"), "it is image/jpeg; send one of image/gif, image/webp, image/png"),
        (animated([a_picture(seed=seed) for seed in range(3)], "GIF")[:-2000], "frame 2 cannot be|cannot be decoded"),
        (b"\0\0\0\x18ftypmp42", "none of image/gif, image/webp, image/png"),
    ],
)
def test_a_video_with_too_many_frames_or_pixels_or_of_another_kind_is_refused(data: bytes, words: str) -> None:
    started = time.thread_time()
    with pytest.raises(InvalidRequest, match=words):
        decode_video(data, None, LIMITS)
    assert time.thread_time() - started < 0.5


def jpegs(*sizes: tuple[int, int]) -> list[str]:
    return [in_base64(encoded(a_picture(*size), "JPEG")) for size in sizes]


def test_a_list_of_jpegs_is_a_video() -> None:
    frames = decode_frame_list(jpegs((40, 30), (40, 30)), LIMITS)
    assert [picture.size for picture in frames.pictures] == [(40, 30)] * 2


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (jpegs((40, 30), (30, 40)), r"frame 1 has size \(30, 40\), the first one \(40, 30\)"),
        ([*jpegs((40, 30)), "?"], "frame 1: its content is no base64"),
        ([*jpegs((40, 30)), in_base64(encoded(a_picture()))], "frame 1: its declared type is image/jpeg, but"),
        (jpegs(*[(60, 60)] * 4), "more than 10000 pixels together"),
        (jpegs(*[(1, 1)] * 9), "9 frames; at most 8"),
        ([""], "frame 0: it is none of"),
    ],
)
def test_a_list_of_others_or_too_many_is_refused(texts: list[str], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        decode_frame_list(texts, LIMITS)


@pytest.mark.parametrize(
    ("text", "words"),
    [("A", "no base64"), ("AAA\n", "no base64"), ("ä", "no base64"), ("A" * (2 << 20), "more than 1048576")],
)
def test_invalid_or_long_base64_is_rejected(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        decode_base64(text, LIMITS)


def damaged(data: bytes, seed: int) -> bytes:
    """Some bytes are others."""
    random = np.random.default_rng(seed)
    spoilt = bytearray(data)
    for place in random.integers(8, len(data), 6):
        spoilt[place] = int(random.integers(0, 256))
    return bytes(spoilt)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("decode", [decode_image, decode_video])
def test_a_damaged_file_is_decoded_or_refused_and_raises_nothing_else(
    kind: str, decode: Callable[[bytes, str | None, DecodeLimits], Frames]
) -> None:
    pictures = [a_picture(20, 20, seed=seed) for seed in range(2)]
    data = encoded(pictures[0], kind) if kind in ("JPEG", "BMP") else animated(pictures, kind)
    roomy = dataclasses.replace(LIMITS, max_pixels=1 << 16)
    for seed in range(12):
        try:
            assert decode(damaged(data, seed), None, roomy).pictures
        except InvalidRequest:
            continue


def test_pillow_opens_nothing_that_is_not_on_the_list() -> None:
    file = io.BytesIO()
    a_picture().save(file, "EPS")  # of which Pillow would start a program
    with pytest.raises(InvalidRequest, match="none of"):
        decode_image(file.getvalue(), None, LIMITS)
