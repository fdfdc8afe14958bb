"""The operator's side of the memory formula, against the golden cases that both packages share."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from trimtab_operator.layout.kv_groups import KvGroup
from trimtab_operator.layout.memory_formula import MemoryShape, kv_capacity, min_utilization

GOLDEN = Path(__file__).parents[2] / "golden" / "memory_formula.json"
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["cases"]


def a_shape(case: dict[str, Any]) -> MemoryShape:
    given = {name: value for name, value in case["given"].items() if name != "gpu_memory_utilization"}
    groups = [
        KvGroup(**{**group, "layers": tuple(range(first, last) for first, last in group["layers"])})
        for group in given["kv_groups"]
    ]
    return MemoryShape(**{**given, "kv_groups": tuple(groups)})


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_formula_gives_what_the_contract_says(case: dict[str, Any]) -> None:
    shape = a_shape(case)
    found = asdict(kv_capacity(shape, case["given"]["gpu_memory_utilization"]))
    found["max_concurrency"] = round(found["max_concurrency"], 4)
    assert {**found, "min_utilization": min_utilization(shape)} == case["expected"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_least_utilisation_holds_one_request_and_the_one_below_does_not(case: dict[str, Any]) -> None:
    shape = a_shape(case)
    least = min_utilization(shape)
    if least is None:
        assert kv_capacity(shape, "1").num_blocks < shape.blocks_per_request
        return
    assert kv_capacity(shape, least).num_blocks >= shape.blocks_per_request
    below = f"{float(least) - 0.0001:.4f}"
    assert kv_capacity(shape, below).num_blocks < shape.blocks_per_request


def test_a_utilisation_that_is_no_decimal_is_an_error() -> None:
    with pytest.raises(ValueError, match="Fraction"):
        kv_capacity(a_shape(CASES[0]), "most of it")
