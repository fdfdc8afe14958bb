"""The clock of another node."""

import pytest
from trimtab_engine.engine_client.nodes.member import clock_offset


@pytest.mark.parametrize(
    ("exchanges", "offset"),
    [
        ([(10.0, 510.5, 11.0)], 500.0),
        ([(10.0, 510.5, 11.0), (20.0, 519.1, 20.2)], 499.0),  # the shortest exchange counts
        ([(10.0, 3.5, 11.0)], -7.0),  # a node that was started later has the smaller clock
    ],
)
def test_the_other_clock_was_read_in_the_middle_of_the_shortest_exchange(
    exchanges: list[tuple[float, float, float]], offset: float
) -> None:
    assert clock_offset(exchanges) == pytest.approx(offset)
