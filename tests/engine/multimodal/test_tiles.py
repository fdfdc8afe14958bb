"""An image split into tiles has transformers' tokens in the prompt, and each tile is an item."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from media_files import a_picture, data_url, encoded
from transformers.models.llama4.processing_llama4 import Llama4Processor
from trimtab_engine.errors import InvalidRequest, ModelError
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.multimodal.checkpoint import (
    TILE_WORDS,
    read_placeholders,
    read_processors,
    read_tile_tokens,
)
from trimtab_engine.multimodal.items import MultiModalItem, Patches
from trimtab_engine.multimodal.placeholders import expand
from trimtab_engine.multimodal.processor_cache import ProcessorCache
from trimtab_engine.multimodal.reader import MediaReader
from trimtab_engine.multimodal.sender_receiver_cache import Sender
from trimtab_engine.multimodal.sources import NOTHING_ELSE
from trimtab_engine.multimodal.tiles import Llama4Tokens, tiles_of
from trimtab_engine.offline.media import OfflineMedia
from trimtab_engine.scheduling.sampling import Sampling

IDS = {word: 200 + number for number, word in enumerate(TILE_WORDS.values())}
TOKENS = Llama4Tokens(**{name: IDS[word] for name, word in TILE_WORDS.items()})
PATCH = IDS["<|patch|>"]


def a_checkpoint(folder: Path) -> str:
    """Write a server's files of a checkpoint without weights."""
    vision = {"patch_size": 4, "image_size": 16}
    (folder / "config.json").write_text(json.dumps({"vision_config": vision, "image_token_index": PATCH}))
    kind = {"image_processor_type": "Llama4ImageProcessorFast", "size": {"height": 16, "width": 16}}
    (folder / "preprocessor_config.json").write_text(json.dumps(kind))
    added = [{"id": number, "content": word} for word, number in IDS.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return str(folder)


def a_picture_of(rows: int, columns: int, *, tokens: int = 2) -> MultiModalItem:
    """Each patch of one value, its tile's number."""
    count = rows * columns + (rows * columns > 1)
    values = b"".join(bytes([number]) * 4 * tokens * 3 for number in range(count))
    patches = Patches(3, values, bytes(3 * 1024))
    return MultiModalItem("image", b"name", count * tokens, (count, 2, 2 * tokens), patches, tiles=(rows, columns))


@pytest.mark.parametrize("tiles", [(1, 1), (1, 2), (2, 1), (3, 2)])
def test_tokens_around_tiles_are_those_of_transformers(tiles: tuple[int, int]) -> None:
    processor: Any = Llama4Processor
    said = processor._prompt_split_image(None, tiles, 2)  # the image has no prompt text
    for word, number in IDS.items():
        said = said.replace(word, f"{number} ")
    picture = a_picture_of(*tiles)
    token_ids, items = TOKENS.written([5, TOKENS.picture, 7], [picture])
    expanded, spans = expand(token_ids, items, {"image": PATCH})
    assert expanded == [5, *map(int, said.split()), 7]
    assert [span.item for span in spans] == tiles_of(picture)


def test_each_tile_is_an_item_with_its_part_and_a_name_of_its_own() -> None:
    tiles = tiles_of(a_picture_of(2, 2))
    assert len({tile.content_hash for tile in tiles}) == len(tiles) == 5
    for number, tile in enumerate(tiles):
        assert (tile.grid, tile.num_tokens, tile.tiles) == ((1, 2, 4), 2, None)
        assert tile.patches is not None
        assert tile.patches.values == bytes([number]) * 24
    assert [tile.content_hash for tile in tiles_of(a_picture_of(2, 2))] == [tile.content_hash for tile in tiles]


def test_the_largest_picture_that_a_core_has_takes_a_kilobyte_on_the_way_to_it() -> None:
    token_ids, items = TOKENS.written([5, TOKENS.picture, 7], [a_picture_of(4, 4)])
    expanded, spans = expand(token_ids, items, {"image": PATCH})
    sender = Sender(1 << 20)
    for _ in range(2):
        short, named = sender.shortened(expanded, spans)
    message = AddRequest("r-0", short, Sampling(), arrival_time=0.0, spans=named)
    assert len(named) == 17
    assert len(msgspec.msgpack.encode(message)) <= 1000


@pytest.mark.parametrize("prompt", [[5, 6], [TOKENS.picture, TOKENS.picture]])
def test_a_prompt_needs_a_place_for_each_picture(prompt: list[int]) -> None:
    with pytest.raises(InvalidRequest, match=f"has places for {prompt.count(TOKENS.picture)} images, but brings 1"):
        TOKENS.written(prompt, [a_picture_of(1, 1)])


def test_a_text_that_holds_the_token_of_patches_is_refused() -> None:
    token_ids, items = TOKENS.written([PATCH, TOKENS.picture], [a_picture_of(1, 1)])
    with pytest.raises(InvalidRequest, match="has places for 2 images, but brings 1 image"):
        expand(token_ids, items, {"image": PATCH})


def test_a_server_and_the_offline_class_cut_a_picture_alike(tmp_path: Path) -> None:
    folder = a_checkpoint(tmp_path)
    picture = a_picture(30, 20, seed=1)

    async def read() -> MultiModalItem:
        reader = MediaReader(read_processors(folder), NOTHING_ELSE, ProcessorCache(1 << 20))
        try:
            return await reader.item("image", data_url(encoded(picture)), "")
        finally:
            await reader.close()

    item = asyncio.run(read())
    tokens = read_tile_tokens(folder, read_processors(folder))
    assert tokens == TOKENS
    assert read_placeholders(folder, ["image"]) == {"image": PATCH}
    served, spans = expand(*tokens.written([5, TOKENS.picture], [item]), {"image": PATCH})
    media = OfflineMedia(folder, ["image"], {"image": 1, "video": 1})
    offline, own = media.expand_placeholders([5, TOKENS.picture], {"image": picture})
    assert offline == served
    assert [span.item.patches for span in own] == [span.item.patches for span in spans]
    assert len(spans) == 5  # 2 x 2 tiles and the whole
    with pytest.raises(InvalidRequest, match="this model does not accept videos"):
        media.expand_placeholders([5], {"video": [picture]})


def test_a_tokenizer_without_the_tokens_of_tiles_is_told(tmp_path: Path) -> None:
    folder = a_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": []}))
    with pytest.raises(ModelError, match=r"tokenizer\.json has no token <\|image\|>"):
        read_tile_tokens(folder, read_processors(folder))
