"""Matmuls with adapters, against adapters merged into the weights: with any operation after the matmul, any assignment
of rows, divided over ranks and computed in parts.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from trimtab_engine.layers.adapted import AdaptedLinear, AdaptedPart, AdapterRows, Factors, StackedAdaptedLinear
from trimtab_engine.layers.linear import GatedLinear, Linear, RowParallelLinear
from trimtab_engine.layers.quantized import BlockFp8, BlockFp8Linear, GatedBlockFp8Linear
from trimtab_kernels.rotary_embedding import interleave_pairs

IN, OUT, RANK = 20, 24, 3
GENERATOR = torch.Generator().manual_seed(3)


@pytest.fixture(autouse=True, params=["grouped", "stacked"])
def for_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs with separate slots and with the contiguous slots that kernels read."""
    monkeypatch.setattr(adapted, "is_stacked", request.param == "stacked", raising=False)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR) * 0.5


def some_factors(outputs: int, inputs: int = IN, rank: int = RANK) -> Factors:
    return Factors(random(rank, inputs), random(outputs, rank))


def adapted(
    base: Linear | BlockFp8Linear, parts: list[AdaptedPart], num_rows: list[int], **slots: dict[str, Factors]
) -> AdaptedLinear:
    """Fill slots with these adapters: slot0, slot1, ..."""
    by_slot = {int(name.removeprefix("slot")): factors for name, factors in slots.items()}
    projection = with_room(base, parts, num_rows, list(by_slot))
    for slot, factors in by_slot.items():
        projection.fill(slot, factors)
    return projection


def with_room(
    base: Linear | BlockFp8Linear, parts: list[AdaptedPart], num_rows: list[int], slots: list[int]
) -> AdaptedLinear:
    if vars(adapted)["is_stacked"]:
        stacked = StackedAdaptedLinear(base, parts, AdapterRows(torch.device("cpu")), num_rows)
        stacked.reserve_slots(1 + max(slots), RANK, torch.empty(0))
        return stacked
    projection = AdaptedLinear(base, parts, AdapterRows(), num_rows)
    for slot in slots:
        projection.reserve_slot(slot, RANK, torch.empty(0))
    return projection


def with_spans(projection: AdaptedLinear, x: torch.Tensor, *spans: tuple[int, int, int]) -> torch.Tensor:
    with projection._rows.of_step(spans, x.shape[0]):
        return projection(x)


Make = Callable[[torch.Tensor, torch.Tensor | None], Linear]


@pytest.mark.parametrize("make", [Linear, GatedLinear], ids=["plain", "gated"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("width", [IN, 19, 64])
def test_rows_get_what_the_merged_weight_gives_them(make: Make, has_bias: bool, width: int) -> None:
    weight, bias = random(2 * width, IN), random(2 * width) if has_bias else None
    first = {"gate": some_factors(width), "up": some_factors(width, rank=2)}
    second = {"up": some_factors(width)}
    parts = [AdaptedPart("gate"), AdaptedPart("up")]
    projection = adapted(make(weight, bias), parts, [width, width], slot0=first, slot3=second)
    x = random(9, IN)
    y = with_spans(projection, x, (0, 2, 0), (2, 1, 3), (4, 3, 0), (8, 1, 3))
    merged = {
        0: weight + torch.cat([first["gate"].up @ first["gate"].down, first["up"].up @ first["up"].down]),
        3: weight + torch.cat([torch.zeros(width, IN), second["up"].up @ second["up"].down]),
        None: weight,
    }
    for row, slot in enumerate([0, 0, 3, None, 0, 0, 0, None, 3]):
        wanted = make(merged[slot], bias)(x[row : row + 1])
        close(y[row : row + 1], wanted)


def test_a_step_in_which_nobody_has_one_is_the_product_alone() -> None:
    projection = adapted(Linear(random(OUT, IN)), [AdaptedPart("q")], [OUT], slot0={"q": some_factors(OUT)})
    x = random(5, IN)
    assert torch.equal(projection(x), projection.base(x))
    assert torch.equal(with_spans(projection, x), projection.base(x))


def test_a_projection_that_the_adapter_leaves_alone_is_computed_as_it_is() -> None:
    projection = adapted(Linear(random(OUT, IN)), [AdaptedPart("q")], [OUT], slot0={"elsewhere": some_factors(OUT)})
    x = random(5, IN)
    assert torch.equal(with_spans(projection, x, (0, 5, 0)), projection.base(x))


def test_room_that_nobody_has_filled_adds_nothing() -> None:
    projection = with_room(Linear(random(OUT, IN)), [AdaptedPart("q")], [OUT], [2])
    x = random(5, IN)
    torch.testing.assert_close(with_spans(projection, x, (0, 5, 2)), projection.base(x))


def test_reused_slot_is_cleared() -> None:
    parts, weight = [AdaptedPart("q"), AdaptedPart("k")], random(OUT, IN)
    both = {"q": some_factors(16), "k": some_factors(8)}
    projection = adapted(Linear(weight), parts, [16, 8], slot0=both)
    one = some_factors(8, rank=1)
    projection.fill(0, {"k": one})
    x = random(4, IN)
    merged = weight + torch.cat([torch.zeros(16, IN), one.up @ one.down])
    close(with_spans(projection, x, (0, 4, 0)), x @ merged.t())


@pytest.mark.parametrize("is_gated", [False, True])
def test_products_of_float8_have_adapters_beside_them_too(is_gated: bool) -> None:
    """The adapter is added before the gate and after the bias; the base matmul is unchanged."""
    blocks, bias = BlockFp8.of(random(128, IN)), random(128)
    make = GatedBlockFp8Linear if is_gated else BlockFp8Linear
    base, factors = make([blocks], bias, torch.float32), some_factors(128)
    projection = adapted(base, [AdaptedPart("q")], [128], slot1={"q": factors})
    x = random(4, IN)
    product = base.product(x)
    product[1:3] += x[1:3] @ (factors.up @ factors.down).t()
    found = with_spans(projection, x, (1, 2, 1))
    close(found, base.finish(product))
    assert found.shape == (4, 64 if is_gated else 128)
    assert (base.out_features, base.in_features) == (128, IN)


def test_rotary_pairs_of_an_adapter_are_interleaved_as_the_weight_s_are() -> None:
    weight, factors = random(16, IN), some_factors(16)
    base = Linear(interleave_pairs(weight, 8))
    projection = adapted(base, [AdaptedPart("q", pairs=8)], [16], slot0={"q": factors})
    x = random(3, IN)
    wanted = x @ interleave_pairs(weight + factors.up @ factors.down, 8).t()
    close(with_spans(projection, x, (0, 3, 0)), wanted)


class Summing:
    """A group of ranks in one process: results of the first ranks are kept for the last."""

    def __init__(self, index: int, brought: list[torch.Tensor]) -> None:
        self.index, self._brought = index, brought

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._brought.append(tensor)
        return torch.stack(self._brought).sum(0)


def test_ranks_that_divide_a_projection_divide_its_adapters() -> None:
    first, second = random(OUT, IN), random(IN, OUT)
    into, out_of = some_factors(OUT), some_factors(IN, OUT)
    x, brought = random(6, IN), list[torch.Tensor]()
    for rank, rows in enumerate([(0, 10), (10, OUT)]):
        cut, bias = slice(*rows), torch.ones(IN)
        column = adapted(Linear(first[cut]), [AdaptedPart("up", rows)], [rows[1] - rows[0]], slot0={"up": into})
        summed = RowParallelLinear(second[:, cut], bias, Summing(rank, brought))  # type: ignore[arg-type]  # a group's
        row = adapted(summed, [AdaptedPart("down", columns=rows)], [IN], slot0={"down": out_of})
        y = with_spans(row, with_spans(column, x, (1, 3, 0)), (1, 3, 0))
    merged = torch.where(torch.tensor([0, 1, 1, 1, 0, 0], dtype=torch.bool)[:, None], 1.0, 0.0)
    hidden = x @ first.t() + merged * (x @ (into.up @ into.down).t())
    wanted = hidden @ second.t() + merged * (hidden @ (out_of.up @ out_of.down).t()) + 1.0
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)


def test_rows_that_follow_each_other_are_a_slice_and_others_an_index() -> None:
    rows = AdapterRows()
    with rows.of_step([(0, 2, 5), (2, 3, 5), (6, 1, 4), (8, 1, 4)]):
        groups = dict(rows.groups)
        assert groups[5] == slice(0, 5)
        assert isinstance(groups[4], torch.Tensor)
        assert groups[4].tolist() == [6, 8]
    assert rows.groups == []


def test_rows_that_are_computed_in_parts_are_counted_from_each_part_s_first() -> None:
    rows = AdapterRows()
    with rows.of_step([(1, 4, 0), (6, 2, 1)]):
        found = []
        for first, count in ((0, 3), (3, 3), (6, 3)):
            with rows.of_part(first, count):
                found.append(rows.groups)
        assert found == [[(0, slice(1, 3))], [(0, slice(0, 2))], [(1, slice(0, 2))]]
        assert rows.groups == [(0, slice(1, 5)), (1, slice(6, 8))]


def test_nothing_is_counted_where_nobody_has_an_adapter() -> None:
    rows = AdapterRows()
    with rows.of_step([]), rows.of_part(0, 8):
        assert rows.groups == []
