"""The columns that random choices on a device depend on."""

import zlib
from functools import partial

import engine_builders
import numpy as np
import pytest
import torch
from trimtab_engine.sampling.choice_columns import ChoiceColumns, digit_hashes, packed_parameters

VOCABULARY = 40
CPU = torch.device("cpu")
a_request = partial(engine_builders.a_request, temperature=1.0)


def test_the_hashes_of_numbers_are_those_of_their_digits() -> None:
    hashes = digit_hashes(4)
    assert len(hashes) == 10_000
    for number in (0, 7, 9, 10, 99, 100, 1234, 9999):
        assert hashes[number] == zlib.crc32(b"%d" % number)


@pytest.mark.parametrize("position", [0, 9, 10, 12345])
def test_seeded_draw_uses_hash_of_seed_and_position(position: int) -> None:
    seeds = [0, 7, -3, 1 << 60]
    packed = [packed_parameters(a_request(seed=seed).sampling, VOCABULARY) for seed in seeds]
    columns = ChoiceColumns.of(packed, [1] * len(seeds), CPU)
    drawn = columns.seeds(np.full(len(seeds), position))
    assert drawn.tolist() == [zlib.crc32(f"{seed} {position}".encode()) for seed in seeds]


def test_rows_of_one_step_are_at_positions_of_their_own() -> None:
    columns = ChoiceColumns.of([packed_parameters(a_request(seed=5).sampling, VOCABULARY)] * 3, [1] * 3, CPU)
    expected = [zlib.crc32(f"5 {position}".encode()) for position in (3, 42, 100_000)]
    assert columns.seeds(np.array([3, 42, 100_000])).tolist() == expected


def test_a_request_without_a_seed_draws_one_from_torch() -> None:
    packed = [packed_parameters(a_request(seed=seed).sampling, VOCABULARY) for seed in (None, 3)]
    columns, at = ChoiceColumns.of(packed, [1, 1], CPU), np.zeros(2, np.int64)
    torch.manual_seed(0)
    first, second = columns.seeds(at), columns.seeds(at)
    assert first[0] != second[0]
    assert first[1] == second[1]
    torch.manual_seed(0)
    assert torch.randint(1 << 62, (2,))[0] == first[0]


def test_the_limits_of_each_request_are_in_its_row() -> None:
    requests = [a_request(top_k=3, min_p=0.25), a_request(temperature=0.5, top_p=0.75)]
    columns = ChoiceColumns.of([packed_parameters(r.sampling, VOCABULARY) for r in requests], [1, 1], CPU)
    assert columns.temperature.tolist() == [1.0, 0.5]
    assert columns.top_k.tolist() == [3, VOCABULARY]
    assert columns.top_p.tolist() == [1.0, 0.75]
    assert columns.min_p.tolist() == [0.25, 0.0]


def test_positions_that_grow_by_a_digit_draw_as_all_others() -> None:
    seeds = [5, None, 8]
    packed = [packed_parameters(a_request(seed=seed).sampling, VOCABULARY) for seed in seeds]
    columns = ChoiceColumns.of(packed, [1] * 3, CPU)
    for step in range(120):
        drawn = columns.seeds(np.array([step, step, 95 + step])).tolist()
        assert drawn[0] == zlib.crc32(b"5 %d" % step)
        assert drawn[2] == zlib.crc32(b"8 %d" % (95 + step))
