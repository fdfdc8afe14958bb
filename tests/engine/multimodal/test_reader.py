"""Client content becomes an item or an error in bounded time, while others are served."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest
from media_files import a_gif_of, a_picture, a_png_of_zeros, animated, data_url, encoded, in_base64
from trimtab_engine.errors import InvalidRequest, ModelError
from trimtab_engine.ipc.bounded_worker import WorkerLimits, WorkersBusy
from trimtab_engine.multimodal.checkpoint import read_placeholders, read_processors
from trimtab_engine.multimodal.decoding import DecodeLimits
from trimtab_engine.multimodal.processor_cache import ProcessorCache
from trimtab_engine.multimodal.qwen2_5_vl import PatchProcessor
from trimtab_engine.multimodal.reader import MediaReader, Processors
from trimtab_engine.multimodal.sources import AllowedSources

PROCESSOR = PatchProcessor(min_pixels=28 * 28, max_pixels=56 * 56)
PROCESSORS = Processors(PROCESSOR, PROCESSOR)
WORKERS = WorkerLimits(seconds=60.0, max_workers=2, max_waiting=16)  # a loaded machine takes its time
LIMITS = DecodeLimits(max_bytes=1 << 20, max_pixels=1 << 20, max_frames=8)


def a_reader(folder: Path | None = None, *, max_bytes: int = 1 << 20, workers: WorkerLimits = WORKERS) -> MediaReader:
    allowed = AllowedSources(None if folder is None else str(folder))
    return MediaReader(PROCESSORS, allowed, ProcessorCache(max_bytes), limits=LIMITS, workers=workers)


@pytest.fixture
async def reader(tmp_path: Path) -> AsyncIterator[MediaReader]:
    reader = a_reader(tmp_path)
    yield reader
    await reader.close()


PNG = data_url(encoded(a_picture(56, 28)))


async def test_an_image_becomes_an_item_once(reader: MediaReader) -> None:
    item = await reader.item("image", PNG, "")
    assert (item.modality, item.num_tokens, item.grid) == ("image", 2, (1, 2, 4))
    assert item.patches is not None
    assert item.patches.is_whole
    assert item.patches.num_rows == item.num_patches
    assert item.patches.values == PROCESSOR.rows([a_picture(56, 28)]).tobytes()
    assert await reader.item("image", PNG, "") is item


async def test_item_key_covers_content_processing_and_salt(reader: MediaReader) -> None:
    frames = [a_picture(28, 28, seed=seed) for seed in range(2)]
    gif = data_url(animated(frames, "GIF"), "image/gif")
    items = [
        await reader.item("image", PNG, ""),
        await reader.item("image", PNG, "another tenant"),
        await reader.item("image", data_url(encoded(a_picture(56, 28, seed=1))), ""),
        await reader.item("image", gif, ""),
        await reader.item("video", gif, ""),
    ]
    other = MediaReader(
        Processors(dataclasses.replace(PROCESSOR, max_pixels=28 * 28), PROCESSOR), AllowedSources(), ProcessorCache(0)
    )
    items.append(await other.item("image", PNG, ""))
    await other.close()
    assert len({item.content_hash for item in items}) == len(items)


async def test_a_file_of_the_server_is_read_where_that_is_allowed(reader: MediaReader, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(a_picture(56, 28)))
    item = await reader.item("image", f"file://{tmp_path}/a.png", "")
    inline = await reader.item("image", PNG, "")
    assert item.patches == inline.patches


async def test_a_dead_link_of_one_request_fails_none_that_names_its_picture_likewise(reader: MediaReader) -> None:
    asked = [("data:image/png;base64,?", "cat"), (PNG, "cat"), (None, "cat"), (PNG, "cat")]
    dead, *good = await asyncio.gather(
        *(reader.item("image", url, "", uuid=uuid) for url, uuid in asked), return_exceptions=True
    )
    assert isinstance(dead, InvalidRequest)
    assert len({id(item) for item in good}) == 1
    assert good[0] is await reader.item("image", None, "", uuid="cat")


async def test_frames_are_a_video_in_their_time(reader: MediaReader) -> None:
    frames = [a_picture(28, 28, seed=seed) for seed in range(4)]
    item = await reader.item("video", data_url(animated(frames, "GIF", milliseconds=250), "image/gif"), "")
    assert (item.modality, item.grid, item.num_tokens, item.seconds_per_step) == ("video", (2, 2, 2), 2, 0.5)
    jpegs = ",".join(in_base64(encoded(frame, "JPEG")) for frame in frames)
    listed = await reader.item("video", f"data:video/jpeg;base64,{jpegs}", "")
    assert (listed.grid, listed.seconds_per_step) == ((2, 2, 2), 2 / 24)


@pytest.mark.parametrize(
    ("modality", "url", "words"),
    [
        ("image", data_url(b"nothing"), "none of image/png"),
        ("image", data_url(encoded(a_picture())[:-30]), "cannot be decoded"),
        ("image", data_url(encoded(a_picture()), "image/jpeg"), "declared type is image/jpeg, but it is image/png"),
        ("image", data_url(encoded(a_picture(1, 300))), "1 x 300 pixels; one side may be 200 times"),
        ("image", data_url(a_png_of_zeros(10_000, 10_000)[: 1 << 19]), "10000 x 10000 pixels; at most 1048576"),
        ("image", "data:image/png;base64,?", "no base64"),
        ("image", data_url(bytes(1 << 21)), "more than 1048576 bytes"),
        ("image", "data:image/png,x", "no data: URL of base64"),
        ("image", "https://images.example.com/x.png", "nothing is fetched from other hosts"),
        ("image", "data:video/jpeg;base64,AAAA,AAAA", "no base64"),
        ("video", data_url(a_gif_of(20_000), "image/gif"), "more than 8 frames"),
        ("video", data_url(b"\0\0\0\x18ftypmp42", "video/mp4"), "decoded"),
        ("video", f"data:video/jpeg;base64,{',' * 20}", "21 frames; at most 8"),
        ("video", f"data:video/jpeg;base64,{'A' * (1 << 21)}", "more than 1048576 bytes"),
    ],
)
async def test_reader_error_is_reported(reader: MediaReader, modality: str, url: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await reader.item("image" if modality == "image" else "video", url, "")
    assert len(reader.cache) == 0


async def test_slow_task_is_killed_and_others_continue() -> None:
    quick = a_reader(workers=WorkerLimits(seconds=60.0, max_workers=1, max_waiting=1))
    assert (await quick.item("image", PNG, "")).num_tokens == 2  # its process has started
    hurried = MediaReader(PROCESSORS, AllowedSources(), ProcessorCache(0), workers=WorkerLimits(1e-6, 1, 1))
    with pytest.raises(InvalidRequest, match="decoding it took more than 1e-06 s"):
        await hurried.item("image", PNG, "")
    assert (await quick.item("image", PNG, "x")).num_tokens == 2
    await hurried.close()
    await quick.close()


async def test_more_than_may_wait_are_sent_away() -> None:
    reader = a_reader(max_bytes=0, workers=WorkerLimits(seconds=60.0, max_workers=1, max_waiting=2))
    answers = await asyncio.gather(*(reader.item("image", PNG, "") for _ in range(12)), return_exceptions=True)
    await reader.close()
    assert any(isinstance(answer, WorkersBusy) for answer in answers)
    assert all(isinstance(answer, WorkersBusy) or getattr(answer, "num_tokens", 0) == 2 for answer in answers)


def test_a_checkpoint_says_which_tokens_stand_for_pictures(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"image_token_id": 7, "video_token_id": "8"}')
    assert read_placeholders(str(tmp_path), ["image"]) == {"image": 7}
    with pytest.raises(ModelError, match="video_token_id is '8'"):
        read_placeholders(str(tmp_path), ["image", "video"])


def patch_size(folder: Path, kind: Literal["image", "video"]) -> int:
    """Return the patch sizes of images and videos of this checkpoint."""
    processor = read_processors(str(folder))[kind]
    assert isinstance(processor, PatchProcessor)
    return processor.patch_size


def test_a_checkpoint_says_how_its_pictures_are_processed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither preprocessor_config\.json nor processor_config\.json"):
        read_processors(str(tmp_path))
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"image_processor": {"patch_size": 16}, "video_processor": {"patch_size": 18}})
    )
    assert (patch_size(tmp_path, "image"), patch_size(tmp_path, "video")) == (16, 18)
    (tmp_path / "preprocessor_config.json").write_text('{"patch_size": 20}')
    assert patch_size(tmp_path, "image") == 20
    (tmp_path / "processor_config.json").unlink()
    assert patch_size(tmp_path, "video") == 20
    (tmp_path / "preprocessor_config.json").write_text("[]")
    with pytest.raises(ModelError, match="is no JSON object"):
        read_processors(str(tmp_path))
    (tmp_path / "preprocessor_config.json").write_text('{"do_resize": false}')
    with pytest.raises(ModelError, match=f"^{tmp_path}/preprocessor_config.json: do_resize is False"):
        read_processors(str(tmp_path))
