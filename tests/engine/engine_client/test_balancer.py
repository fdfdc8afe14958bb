"""Load balancing over engine cores."""

import random

from trimtab_engine.engine_client.balancer import CoreBalancer


def test_equal_cores_take_turns() -> None:
    balancer = CoreBalancer(3)
    chosen = []
    for _ in range(6):
        chosen.append(balancer.choose())
        balancer.sent(chosen[-1])
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_the_core_with_the_least_in_flight_is_chosen() -> None:
    balancer = CoreBalancer(2)
    for core in (0, 0, 1):
        balancer.sent(core)
    assert balancer.choose() == 1
    balancer.ended(0)
    balancer.ended(0)
    assert balancer.choose() == 0


def test_reported_load_counts_if_above_sent_requests() -> None:
    balancer = CoreBalancer(2)
    balancer.report(0, num_running=5, num_waiting=0, kv_usage=0.1)
    assert [balancer.choose() for _ in range(3)] == [1, 1, 1]


def test_waiting_requests_weigh_more_the_fuller_the_cache_is() -> None:
    balancer = CoreBalancer(2)
    balancer.report(0, num_running=2, num_waiting=2, kv_usage=0.9)
    balancer.report(1, num_running=6, num_waiting=0, kv_usage=0.9)
    assert balancer.choose() == 1
    balancer.report(0, num_running=2, num_waiting=2, kv_usage=0.4)
    assert balancer.choose() == 0


def test_a_core_that_refused_is_passed_over_until_all_have() -> None:
    balancer = CoreBalancer(2)
    balancer.sent(1)
    assert balancer.choose() == 0
    assert balancer.choose(frozenset({0})) == 1
    assert balancer.choose(frozenset({0, 1})) == 0


def spread(choose: str) -> float:
    """Return the largest load over the mean, for requests whose lengths vary by a factor of 100."""
    dice = random.Random(4)
    balancer = CoreBalancer(4)
    running: list[list[int]] = [[] for _ in range(4)]
    ratios = []
    for number in range(4000):
        core = balancer.choose() if choose == "least" else number % 4
        balancer.sent(core)
        running[core].append(dice.choice([1, 2, 3, 100]))
        for index, left in enumerate(running):
            after = [steps - 1 for steps in left]
            for steps in after:
                if steps == 0:
                    balancer.ended(index)
            running[index] = [steps for steps in after if steps]
        counts = [len(left) for left in running]
        ratios.append(max(counts) * 4 / max(sum(counts), 1))
    return sum(ratios[400:]) / len(ratios[400:])


def test_balancer_beats_round_robin_for_mixed_lengths() -> None:
    assert spread("least") < 1.2 < spread("turns")
