"""Memory of activations that an earlier start measured."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.device.allocations import Growth
from trimtab_engine.executor import remembered_profile
from trimtab_engine.executor.remembered_profile import MAX_ENTRIES, Entry, profile_key, remembered
from trimtab_engine.executor.start import LoadedRank, load_rank
from trimtab_engine.memory.reserved import cpu_activation_bytes

MEASURED = 1_000_000


class Measurement:
    """Counts full measurements."""

    def __init__(self, num_bytes: int = MEASURED) -> None:
        self.num_bytes, self.count = num_bytes, 0

    def __call__(self) -> int:
        self.count += 1
        return self.num_bytes


def probe(kept: int = 100, peak: int = 1000) -> Growth:
    return Growth(kept, peak)


def start(folder: Path, key: str = "k", small: Growth | None = None, num_bytes: int = MEASURED) -> tuple[int, int]:
    """Return the result of one start and its number of full measurements."""
    measure = Measurement(num_bytes)
    return remembered(key, lambda: small or probe(), measure, folder), measure.count


def test_second_start_does_not_measure_and_agrees(tmp_path: Path) -> None:
    first, count = start(tmp_path)
    assert first == cpu_activation_bytes(100, 0) + MEASURED
    assert (count, start(tmp_path)) == (1, (first, 0))


@pytest.mark.parametrize("small", [probe(kept=101), probe(peak=1001)])
def test_other_probe_measures_again_and_replaces(tmp_path: Path, small: Growth) -> None:
    start(tmp_path)
    assert start(tmp_path, small=small, num_bytes=2 * MEASURED)[1] == 1
    assert start(tmp_path, small=small)[1] == 0
    assert start(tmp_path)[1] == 1


def test_other_key_measures(tmp_path: Path) -> None:
    start(tmp_path)
    assert start(tmp_path, key="other")[1] == 1


def test_foreign_entry_under_this_name_is_not_used(tmp_path: Path) -> None:
    start(tmp_path, key="other", num_bytes=5)
    (tmp_path / "other.json").rename(tmp_path / "k.json")
    assert start(tmp_path) == (cpu_activation_bytes(100, 0) + MEASURED, 1)


@pytest.mark.parametrize("field", ["activations", "probe_kept", "probe_peak", "key", "digest"])
def test_changed_field_is_detected(tmp_path: Path, field: str) -> None:
    start(tmp_path)
    file = tmp_path / "k.json"
    entry = json.loads(file.read_text())
    entry[field] = entry[field] + (1 if isinstance(entry[field], int) else "x")
    file.write_text(json.dumps(entry))
    assert start(tmp_path)[1] == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"key": "k"}', b"\xff"])
def test_unreadable_entry_is_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "k.json").write_bytes(content)
    assert start(tmp_path)[1] == 1
    assert start(tmp_path)[1] == 0


def test_activations_below_the_probe_are_not_used(tmp_path: Path) -> None:
    entry = Entry.of("k", probe(), 999)
    (tmp_path / "k.json").write_bytes(msgspec.json.encode(entry))
    assert start(tmp_path)[1] == 1


def test_result_is_at_least_the_probe(tmp_path: Path) -> None:
    assert start(tmp_path, num_bytes=0)[0] == cpu_activation_bytes(1000, 0)


def test_unwritable_folder_measures_every_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert start(tmp_path / "file" / "profiles")[1] == 1


def test_number_of_entries_is_bounded(tmp_path: Path) -> None:
    for number in range(MAX_ENTRIES + 3):
        start(tmp_path, key=f"k{number}")
    assert len(list(tmp_path.iterdir())) == MAX_ENTRIES


@pytest.fixture
def rank(tiny_model: Path) -> LoadedRank:
    return load_rank(make_config(tiny_model), lambda stage, percent: None, None)


def make_config(model: Path, **fields: int) -> EngineConfig:
    sizes: dict[str, Any] = {
        "device_memory_bytes": 1 << 30,
        "max_model_len": 64,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        **fields,
    }
    return EngineConfig(model=str(model), load_format="dummy", device="cpu", **sizes)


def test_real_start_and_real_second_start_agree(
    rank: LoadedRank, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    config = make_config(tiny_model)
    rank.measure(config)  # allocates the buffers that torch keeps
    first = rank.measure(config)
    monkeypatch.setattr(type(rank.runner), "profile", lambda *_: pytest.fail("profiled"))
    assert rank.measure(config) == first


def test_key_has_configuration_model_and_threads(rank: LoadedRank, tiny_model: Path) -> None:
    facts = rank.runner.facts
    key = profile_key(make_config(tiny_model), facts, 2)
    assert key == profile_key(make_config(tiny_model), facts, 2)
    others = {
        profile_key(make_config(tiny_model, max_num_batched_tokens_cap=128), facts, 2),
        profile_key(make_config(tiny_model), facts, 1),
        profile_key(make_config(tiny_model), replace(facts, weights_bytes=1), 2),
    }
    assert key not in others
    assert len(others) == 3


def test_key_has_the_sources(rank: LoadedRank, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = profile_key(make_config(tiny_model), rank.runner.facts, 2)
    monkeypatch.setattr(remembered_profile, "_sources", lambda package: "changed")
    assert profile_key(make_config(tiny_model), rank.runner.facts, 2) != key
