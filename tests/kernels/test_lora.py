"""lora, in the interpreter: what adapters add, however rows, slots, ranks and columns are cut."""

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
"""(n, k, rank): of one tile; of tiles that are not full, and a rank that is no power of two; of several slices; of a
rank that takes two tiles."""
TOLERANCES = {torch.float32: 3e-5, torch.float16: 4e-3}
"""Relative: about four roundings of the dtype."""
if os.environ["TRITON_INTERPRET"] == "0":  # the interpreter has no products of bfloat16
    TOLERANCES[torch.bfloat16] = 3e-2


def inputs(
    slots: list[int], n: int, k: int, rank: int, dtype: torch.dtype = torch.float32, num_slots: int = 4
) -> tuple[torch.Tensor, ...]:
    """y, x, down, up and slots. Rows of x and y lie apart."""
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
def test_each_row_gets_what_its_adapter_adds(slots: list[int], n: int, k: int, rank: int, dtype: torch.dtype) -> None:
    arguments = inputs(slots, n, k, rank, dtype)
    expected = lora_reference(*arguments)
    before = arguments[0].clone()
    lora_triton(*arguments, facts=H200)
    check(arguments[0], expected)
    without = torch.tensor(slots) == NONE
    assert torch.equal(arguments[0][without], before[without]), "rows without an adapter are as they were"


def test_where_nobody_has_an_adapter_nothing_is_read() -> None:
    y, x, down, up, slots = inputs([NONE] * 35, 40, 72, 16)
    before = y.clone()
    lora_triton(y, x * torch.nan, down * torch.nan, up * torch.nan, slots, facts=H200)
    assert torch.equal(y, before)


def test_what_lies_in_other_slots_is_not_read() -> None:
    y, x, down, up, slots = inputs(MIXED, 40, 72, 16)
    expected = lora_reference(y, x, down, up, slots)
    down[1], up[1] = torch.nan, torch.nan
    lora_triton(y, x, down, up, slots, facts=H200)
    check(y, expected)


@pytest.mark.parametrize("rows", [FEW_ROWS * MANY_ROWS, FEW_ROWS * MANY_ROWS + 1])
def test_many_rows_take_larger_tiles(rows: int) -> None:
    """Few of them have an adapter, so that it is quick in the interpreter."""
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
def test_equal_inputs_give_equal_outputs(facts: DeviceFacts) -> None:
    def run() -> torch.Tensor:
        y, *others = inputs(MIXED, 33, 2 * MIN_SLICE + 1, 16)
        lora_triton(y, *others, facts=facts)
        return y

    assert torch.equal(run(), run())


def test_k_is_cut_where_programs_are_few() -> None:
    assert [slices_of(programs, 4096, H200) for programs in (1, 16, 33, 66, 132, 1000)] == [8, 8, 4, 2, 1, 1]
    assert slices_of(1, 500, H200) == 1
    assert slices_of(1, 14336, H200) == 16


@pytest.mark.cpu
@pytest.mark.parametrize(("n", "k", "rank"), SHAPES[:2])
def test_the_cpu_takes_one_slot_after_the_other(n: int, k: int, rank: int) -> None:
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
def test_what_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="lora: x is"):
        lora_triton(**changed(**changes), facts=H200)


def test_no_rows_are_no_launch() -> None:
    y, x, down, up, slots = inputs([0], 40, 72, 16)
    lora_triton(y[:0], x[:0], down, up, slots[:0], facts=H200)
