"""lora in the interpreter for all partitions of rows, slots, ranks and columns."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from trimtab_kernels.launch.device_facts import H200, DeviceFacts
from trimtab_kernels.lora import (
    FEW_ROWS,
    MANY_ROWS,
    MIN_SLICE,
    NONE,
    RANK_STEP,
    add_lora,
    lora_cpu,
    lora_reference,
    lora_triton,
    slices_of,
)

SHAPES = [(40, 72, 16), (130, 257, 48), (33, 2 * MIN_SLICE + 1, 16), (48, 80, 80)]
"""(n, k, rank): one tile; partially filled tiles and a rank that is not a power of two; several slices; a rank of two
tiles."""
TOLERANCES = {torch.float32: 3e-5, torch.float16: 4e-3}
"""Relative: about four roundings of the dtype."""
if os.environ["TRITON_INTERPRET"] == "0":  # the interpreter does not multiply bfloat16
    TOLERANCES[torch.bfloat16] = 3e-2


def inputs(
    slots: list[int], n: int, k: int, rank: int, dtype: torch.dtype = torch.float32, num_slots: int = 4
) -> tuple[torch.Tensor, ...]:
    """Return y, x, down, up and slots. x and y have a row stride."""
    generator = torch.Generator().manual_seed(n + k)
    rows = len(slots)
    x = torch.randn(rows, k + 8, generator=generator).to(dtype)[:, :k]
    y = torch.randn(rows, n + 4, generator=generator).to(dtype)[:, :n]
    down = torch.randn(num_slots, rank, k, generator=generator).to(dtype) / k**0.5
    up = torch.randn(num_slots, n, rank, generator=generator).to(dtype) / rank**0.5
    return y, x, down, up, torch.tensor(slots, dtype=torch.int32)


def check(y: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[y.dtype]
    torch.testing.assert_close(y.float(), expected, atol=tolerance, rtol=tolerance)


MIXED = [2, NONE, 0, 0, 3, NONE, 2] * 5
CHUNKS = [1] * 20 + [NONE] * 17 + [3] * 30 + [0]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("n", "k", "rank"), SHAPES)
@pytest.mark.parametrize("slots", [[0], [NONE, 3], MIXED, CHUNKS], ids=["one", "two", "mixed", "chunks"])
def test_lora_adds_each_rows_adapter(slots: list[int], n: int, k: int, rank: int, dtype: torch.dtype) -> None:
    arguments = inputs(slots, n, k, rank, dtype)
    expected = lora_reference(*arguments)
    before = arguments[0].clone()
    lora_triton(*arguments, facts=H200)
    check(arguments[0], expected)
    without = torch.tensor(slots) == NONE
    assert torch.equal(arguments[0][without], before[without]), "rows without an adapter are as they were"


def test_lora_without_adapters_reads_nothing() -> None:
    y, x, down, up, slots = inputs([NONE] * 35, 40, 72, 16)
    before = y.clone()
    lora_triton(y, x * torch.nan, down * torch.nan, up * torch.nan, slots, facts=H200)
    assert torch.equal(y, before)


def test_lora_does_not_read_other_slots() -> None:
    y, x, down, up, slots = inputs(MIXED, 40, 72, 16)
    expected = lora_reference(y, x, down, up, slots)
    down[1], up[1] = torch.nan, torch.nan
    lora_triton(y, x, down, up, slots, facts=H200)
    check(y, expected)


@pytest.mark.parametrize("rows", [FEW_ROWS * MANY_ROWS, FEW_ROWS * MANY_ROWS + 1])
def test_lora_uses_larger_tiles_for_many_rows(rows: int) -> None:
    """Few rows have an adapter, so that the interpreter is fast."""
    slots = [NONE] * rows
    slots[3], slots[rows - 1] = 0, 2
    y, x, down, up, own = inputs(slots, 24, 32, 16)
    before = y.clone()
    lora_triton(y, x, down, up, own, facts=H200)
    for row in (3, rows - 1):
        check(y[row : row + 1], lora_reference(before[row:][:1], x[row:][:1], down, up, own[row:][:1]))
    y[[3, rows - 1]] = before[[3, rows - 1]]
    assert torch.equal(y, before)


@pytest.mark.parametrize("facts", [H200, replace(H200, num_sms=1)])
def test_lora_equal_inputs_give_equal_outputs(facts: DeviceFacts) -> None:
    def run() -> torch.Tensor:
        y, *others = inputs(MIXED, 33, 2 * MIN_SLICE + 1, 16)
        lora_triton(y, *others, facts=facts)
        return y

    assert torch.equal(run(), run())


def test_lora_splits_k_if_ctas_are_few() -> None:
    assert [slices_of(programs, 4096, H200) for programs in (1, 16, 33, 66, 132, 1000)] == [8, 8, 4, 2, 1, 1]
    assert slices_of(1, 500, H200) == 1
    assert slices_of(1, 14336, H200) == 16


@pytest.mark.cpu
@pytest.mark.parametrize(("n", "k", "rank"), SHAPES[:2])
def test_lora_on_cpu_processes_slots_in_turn(n: int, k: int, rank: int) -> None:
    arguments = inputs(MIXED, n, k, rank)
    expected = lora_reference(*arguments)
    for add in (lora_cpu, add_lora):
        y = arguments[0].clone()
        add(y, *arguments[1:])
        check(y, expected)


def changed(**changes: Any) -> dict[str, torch.Tensor]:
    y, x, down, up, slots = inputs([0, 1], 40, 72, 16)
    named = {"y": y, "x": x, "down": down, "up": up, "slots": slots}
    return named | {name: change(named[name]) for name, change in changes.items()}


@pytest.mark.parametrize(
    "changes",
    [
        {"x": lambda t: t.half()},
        {"slots": lambda t: t.long()},
        {"slots": lambda t: t[:1]},
        {"y": lambda t: t[:, :-1]},
        {"down": lambda t: t[:, : RANK_STEP - 1]},
        {"down": lambda t: t[:, : RANK_STEP - 1], "up": lambda t: t[..., : RANK_STEP - 1].contiguous()},
        {"up": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)},
    ],
)
def test_lora_rejects_mismatched_inputs(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="lora: x is"):
        lora_triton(**changed(**changes), facts=H200)


def test_lora_without_rows_launches_nothing() -> None:
    y, x, down, up, slots = inputs([0], 40, 72, 16)
    lora_triton(y[:0], x[:0], down, up, slots[:0], facts=H200)
