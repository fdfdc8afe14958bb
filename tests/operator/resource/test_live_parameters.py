"""Caps of the live parameters without bounds in the resource."""

from __future__ import annotations

from decimal import Decimal

import pytest
from trimtab_operator.resource.live_parameters import live_parameters
from trimtab_operator.resource.spec import Engine, ModelSource, Spec


@pytest.mark.parametrize(("start", "cap"), [(2048, 4096), (600_000, 1_048_576), (1_048_576, 1_048_576)])
def test_a_default_cap_is_twice_the_start_and_never_more_than_the_engine_takes(start: int, cap: int) -> None:
    spec = Spec(model=ModelSource(uri="file:///models/m"), engine=Engine(max_num_batched_tokens=start))
    assert live_parameters(spec)[2].cap == Decimal(cap)
