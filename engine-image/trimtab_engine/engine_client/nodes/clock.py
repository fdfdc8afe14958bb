"""Another node's clock: messages carry CLOCK_MONOTONIC seconds of node 0, which every node has to translate. Pure."""

from collections.abc import Iterable


def clock_offset(exchanges: Iterable[tuple[float, float, float]]) -> float:
    """Seconds to add to this node's clock to have node 0's.

    An exchange is (sent here, read there, answered here): the other clock was read in between, and in the shortest
    exchange it is known best, to half its length.
    """
    sent, there, answered = min(exchanges, key=lambda exchange: exchange[2] - exchange[0])
    return there - (sent + answered) / 2
