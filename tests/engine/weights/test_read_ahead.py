"""Prefetching: the next tensors in layer order, once, within a limit."""

import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from trimtab_engine.weights import read_ahead
from trimtab_engine.weights.read_ahead import ReadAhead
from trimtab_engine.weights.safetensors_files import SafetensorsSource, read_header

ROWS = 4  # of 8 floats: 128 bytes


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were prefetched; the system call is made, too."""
    names: list[str] = []
    own = read_ahead._ask

    def ask(place: read_ahead._Place) -> None:
        names.append(place.name)
        own(place)

    class AtOnce:
        def put(self, place: read_ahead._Place | None) -> None:
            if place is not None:
                ask(place)

        def get(self) -> None:
            """The thread has nothing to do."""

    monkeypatch.setattr(read_ahead, "SimpleQueue", AtOnce)
    monkeypatch.setattr(read_ahead, "_ask", ask)
    return names


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Layers 0 to 11 in two files, as names are sorted by bytes: 0, 1, 10, 11, 2, …"""
    names = sorted(f"model.layers.{layer}.weight" for layer in range(12))
    for number, own in enumerate((names[:5], names[5:])):
        tensors = {name: torch.full((ROWS, 8), float(name.split(".")[2])) for name in own}
        save_file(tensors, tmp_path / f"model-{number}.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def layers(names: list[str]) -> list[int]:
    return [int(name.split(".")[2]) for name in names]


def test_following_tensors_are_prefetched_once_in_layer_order(
    folder: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 3 * ROWS * 8 * 4)
    ahead = ReadAhead({file: read_header(file) for file in folder.glob("*.safetensors")})
    ahead.wanted("model.layers.0.weight")
    assert layers(asked) == [0, 1, 2, 3]
    ahead.wanted("model.layers.1.weight")
    ahead.wanted("model.layers.1.weight")
    assert layers(asked) == [0, 1, 2, 3, 4]
    ahead.wanted("model.layers.9.weight")
    assert layers(asked)[5:] == [9, 10, 11]
    ahead.wanted("model.layers.5.weight")
    assert layers(asked)[8:] == [5, 6, 7, 8]


def test_tables_are_asked_for_behind_the_last_layer(folder: Path, asked: list[str]) -> None:
    tables = {name: torch.zeros(ROWS, 8) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(tables, folder / "tables.safetensors")
    ahead = ReadAhead({file: read_header(file) for file in folder.glob("*.safetensors")})
    ahead.wanted("model.layers.10.weight")
    assert asked[:2] == ["model.layers.10.weight", "model.layers.11.weight"]
    assert sorted(asked[2:]) == sorted(tables)


def test_a_place_is_where_the_numbers_are(folder: Path) -> None:
    ahead = ReadAhead({file: read_header(file) for file in folder.glob("*.safetensors")})
    for place in ahead._places:
        data = place.file.read_bytes()[place.first : place.first + place.num_bytes]
        assert torch.frombuffer(bytearray(data), dtype=torch.float32).tolist() == [float(place.name.split(".")[2])] * 32


def test_large_tensor_is_prefetched_in_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, first, size, advice: pieces.append((first, size)))
    size = 3 * read_ahead.PIECE_BYTES + 5
    read_ahead._ask(read_ahead._Place("large", next(folder.glob("*.safetensors")), 77, size))
    assert [first for first, _ in pieces] == [77 + number * read_ahead.PIECE_BYTES for number in range(4)]
    assert [num_bytes for _, num_bytes in pieces] == [read_ahead.PIECE_BYTES] * 3 + [5]


def test_tensor_read_does_not_wait_for_prefetching(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_free, took = threading.Event(), threading.Event()

    def ask(place: read_ahead._Place) -> None:
        assert is_free.wait(30)
        if place.name == "model.layers.11.weight":
            took.set()

    monkeypatch.setattr(read_ahead, "_ask", ask)
    ahead = ReadAhead({file: read_header(file) for file in folder.glob("*.safetensors")})
    ahead.wanted("model.layers.0.weight")
    is_free.set()
    assert took.wait(30)


def test_only_a_checkpoint_that_is_about_to_be_loaded_is_asked_for(folder: Path, asked: list[str]) -> None:
    source = SafetensorsSource(folder)
    source.tensor("model.layers.2.weight")
    assert asked == []
    source.map_files()
    source.tensor("model.layers.2.weight", rows=(0, 2))
    assert layers(asked) == list(range(2, 12))


def test_the_thread_ends_with_who_reads(folder: Path) -> None:
    def asking() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]

    before = asking()
    ahead = ReadAhead({file: read_header(file) for file in folder.glob("*.safetensors")})
    (own,) = (thread for thread in asking() if thread not in before)
    assert own.daemon  # a process that ends by an error ends
    ahead.wanted("model.layers.0.weight")
    del ahead
    own.join(timeout=10.0)
    assert not own.is_alive()
