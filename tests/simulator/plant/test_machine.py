"""Machines by name, and calibration files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trimtab_simulator.errors import BadCalibration, BadRequest
from trimtab_simulator.plant.machine import machine_of


def a_file(folder: Path, content: Any) -> Path:
    path = folder / "calibration.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_unknown_machine_is_rejected_with_known_ones() -> None:
    assert machine_of("Llama-3.1-8B", "H200").cost.seconds(16_000, 0, 0, 0) == pytest.approx(1.008)
    with pytest.raises(BadRequest, match=r"llama-3.1-8b on h200\); give --calibration"):
        machine_of("llama-3.1-70b", "h200")


def test_calibration_overrides_named_values(tmp_path: Path) -> None:
    machine = machine_of("llama-3.1-8b", "h200", a_file(tmp_path, {"per_step": 0.02, "kv_tokens": 160}))
    assert (machine.cost.per_step, machine.cost.per_token, machine.blocks_at(0.9)) == (0.02, 1 / 16_000, 10)


def test_another_machine_needs_all_coefficients(tmp_path: Path) -> None:
    given = {"per_step": 0.02, "per_token": 1e-4, "per_sequence": 0, "per_context": 0}
    with pytest.raises(BadCalibration, match="kv_tokens"):
        machine_of("m", "g", a_file(tmp_path, given))
    assert machine_of("m", "g", a_file(tmp_path, {**given, "kv_tokens": 1000})).cost.per_token == 1e-4
    with pytest.raises(BadCalibration, match="per_context"):
        machine_of("m", "g", a_file(tmp_path, {"per_step": 1, "per_token": 1, "per_sequence": 1}))


def test_measured_intervals_are_fitted(tmp_path: Path) -> None:
    intervals = [
        {
            "steps": steps,
            "tokens": tokens,
            "sequences": sequences,
            "context": context,
            "seconds": 0.01 * steps + 1e-4 * tokens + 2e-4 * sequences + 3e-8 * context,
        }
        for steps, tokens, sequences, context in (
            (100, 100, 100, 9_000),
            (100, 800, 800, 900_000),
            (50, 20_000, 200, 50_000),
            (10, 40, 40, 400_000),
            (80, 9_000, 90, 1_000),
        )
    ]
    cost = machine_of("m", "g", a_file(tmp_path, {"steps": intervals, "kv_tokens": 1000})).cost
    assert cost.per_step == pytest.approx(0.01, rel=1e-3)
    assert cost.per_token == pytest.approx(1e-4, rel=1e-3)
    assert cost.per_sequence == pytest.approx(2e-4, rel=1e-3)
    assert cost.per_context == pytest.approx(3e-8, rel=1e-3)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not JSON"),
        ([], "not a JSON object"),
        ({"per_setp": 1}, "has per_setp"),
        ({"per_step": "fast"}, "per_step is 'fast'"),
        ({"per_step": -1}, "per_step is -1"),
        ({"per_step": True}, "per_step is True"),
        ({"gpu": "h100"}, "is for gpu h100, not h200"),
        ({"kv_tokens": 0}, "kv_tokens is 0"),
        ({"per_step": 0, "per_token": 0, "per_sequence": 0, "per_context": 0}, "takes no time"),
        ({"steps": []}, "at least 4 intervals"),
        ({"steps": [{}] * 4}, "interval 0 lacks steps"),
    ],
)
def test_invalid_calibration_is_rejected(tmp_path: Path, content: Any, reason: str) -> None:
    with pytest.raises(BadCalibration, match=reason):
        machine_of("llama-3.1-8b", "h200", a_file(tmp_path, content))


def test_a_missing_calibration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCalibration, match="No such file"):
        machine_of("llama-3.1-8b", "h200", tmp_path / "none")


def test_more_utilisation_is_more_blocks_up_to_the_device() -> None:
    machine = machine_of("llama-3.1-8b", "h200")
    assert machine.blocks_at(0.95) - machine.blocks_at(0.90) == pytest.approx(0.05 * 141e9 / 131_072 / 16, abs=1)
    assert 0 < machine.least_utilization < 0.9
