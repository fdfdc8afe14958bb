"""The loading benchmark: files are cold, rounds alternate, and the output."""

import json
import os
from pathlib import Path

import pytest
import torch
from engine_benchmarks.loading_bench import Measured, load, make_cold, measure, read_all, resident_share
from engine_benchmarks.random_checkpoint import CONFIG, layers_for, num_bytes, write
from safetensors import safe_open
from trimtab_engine.models.registry import open_model


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"{name}.safetensors" for name in "ab"]
    for file in made:
        file.write_bytes(os.urandom(1 << 20))
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    return made


def test_dropped_files_are_read_from_disk_again(files: list[Path]) -> None:
    read_all(files)
    assert resident_share(files) == 1.0
    try:
        make_cold(files)
    except RuntimeError:
        pytest.skip("this file system keeps its pages in memory")
    assert resident_share(files) <= 0.5  # 0.05 directly after the drop; the kernel may read pages ahead since


def test_rounds_alternate_and_shares_are_per_round(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []
    seconds = iter([4.0, 1.0, 2.0, 1.0, 4.0, 1.0])

    def loads(folder: Path, ranks: int, threads: int) -> float:
        requested.append("load")
        return next(seconds)

    def reads(files: list[Path]) -> float:
        requested.append("read")
        return 2.0

    monkeypatch.setattr("engine_benchmarks.loading_bench.make_cold", lambda files: requested.append("drop"))
    monkeypatch.setattr("engine_benchmarks.loading_bench.read_all", reads)
    measured = measure(files[0].parent, 2, 3, 1, loads)
    assert requested == ["drop", "read", "drop", "load", "load"] * 3
    assert (measured.file_bytes, measured.share) == (2 << 20, 0.5)
    assert measured.summary()["cold_seconds"] == [4.0, 2.0, 4.0]


def test_rates_are_of_median_round() -> None:
    measured = Measured(1, 10**9, [1.0, 0.5, 2.0], [1.0, 2.0, 4.0], [0.5, 0.5, 9.0])
    assert measured.summary()["gigabytes_per_second"] == {"read": 1.0, "cold": 0.5, "warm": 2.0}


def test_random_checkpoint_has_small_numbers_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_bytes(layers_for(1.5)) == pytest.approx(1.5e9, rel=0.05)
    sizes = {"hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4, "vocab_size": 97}
    monkeypatch.setattr("engine_benchmarks.random_checkpoint.CONFIG", CONFIG | sizes)
    write(tmp_path / "made", 2)
    assert set(open_model(str(tmp_path / "made")).shapes()) >= {"lm_head.weight", "model.layers.1.mlp.up_proj.weight"}
    first = sorted((tmp_path / "made").glob("*.safetensors"))[0]
    with safe_open(first, framework="pt") as opened:
        weight = opened.get_tensor("model.embed_tokens.weight")
    assert weight.dtype == torch.bfloat16
    assert 2**-7 <= float(weight.abs().min()) <= float(weight.abs().max()) <= 2**-6
    assert bool((weight < 0).any())


def test_load_is_timed_from_first_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4, "vocab_size": 97}
    monkeypatch.setattr("engine_benchmarks.random_checkpoint.CONFIG", CONFIG | sizes)
    write(tmp_path / "made", 2)
    assert json.loads((tmp_path / "made" / "config.json").read_text())["num_hidden_layers"] == 2
    assert 0 < load(tmp_path / "made", 1, 1) < 60
