"""Order, fairness and bounds of the queue of held requests."""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from trimtab_router.hold.queue import (
    AGE_GUARD_SECONDS,
    AGED_SHARE,
    MIN_COST_TOKENS,
    QUANTUM_TOKENS,
    HeldRequest,
    HoldQueue,
)


def make_request(tenant: str = "a", priority: int = 0, num_bytes: int = 1, held_at: float = 0.0) -> HeldRequest:
    return HeldRequest(tenant, priority, num_bytes, held_at)


def serve_all(queue: HoldQueue, cost: float = 1000.0, now: float = 0.0) -> list[HeldRequest]:
    served = []
    while (request := queue.head(now)) is not None:
        queue.serve(request, cost)
        served.append(request)
    return served


def test_queue_serves_lower_bands_first() -> None:
    queue = HoldQueue(100, 100)
    for priority in (1, 0, -5, 1, 0):
        queue.push(make_request(priority=priority))
    assert [request.priority for request in serve_all(queue)] == [-5, 0, 0, 1, 1]


def test_head_is_the_same_until_it_is_served() -> None:
    queue = HoldQueue(100, 100)
    for tenant in "abcabc":
        queue.push(make_request(tenant))
    for _ in range(6):
        head = queue.head(0.0)
        assert head is not None
        assert all(queue.head(0.0) is head for _ in range(5))
        queue.serve(head, 5000)
    assert queue.head(0.0) is None


def test_flood_of_one_tenant_leaves_others_their_share() -> None:
    queue = HoldQueue(10_000, 10_000)
    for _ in range(1000):
        queue.push(make_request("flood"))
    for _ in range(50):
        queue.push(make_request("b"))
        queue.push(make_request("c"))
    counts = Counter(request.tenant for request in serve_all(queue, cost=1500)[:90])
    assert all(28 <= counts[tenant] <= 32 for tenant in ("flood", "b", "c"))


def test_shares_are_equal_in_tokens_not_in_requests() -> None:
    queue = HoldQueue(10_000, 10_000)
    for _ in range(600):
        queue.push(make_request("long"))
        queue.push(make_request("short"))
    tokens: Counter[str] = Counter()
    for _ in range(400):
        request = queue.head(0.0)
        assert request is not None
        cost = 20_000 if request.tenant == "long" else 500
        queue.serve(request, cost)
        tokens[request.tenant] += cost
    assert abs(tokens["long"] - tokens["short"]) <= 20_000 + QUANTUM_TOKENS


def test_debt_is_kept_while_the_tenant_has_no_request() -> None:
    """A tenant that sends one request at a time pays for it like one with a long queue."""
    queue = HoldQueue(100, 100)
    for _ in range(60):
        queue.push(make_request("b"))
    queue.push(make_request("a"))
    counts: Counter[str] = Counter()
    for _ in range(50):
        request = queue.head(0.0)
        assert request is not None
        queue.serve(request, 40_000 if request.tenant == "a" else 2000)
        counts[request.tenant] += 1
        if request.tenant == "a":
            queue.push(make_request("a"))
    assert counts["a"] <= 4


def test_cached_requests_are_charged_too() -> None:
    queue = HoldQueue(1000, 1000)
    for _ in range(200):
        queue.push(make_request("cached"))
    queue.push(make_request("other"))
    order = [request.tenant for request in serve_all(queue, cost=0)]
    assert order.index("other") <= QUANTUM_TOKENS // MIN_COST_TOKENS


def test_old_requests_of_lower_bands_are_not_starved() -> None:
    queue = HoldQueue(1000, 1000)
    for _ in range(40):
        queue.push(make_request("batch", priority=5, held_at=0.0))
    now = AGE_GUARD_SECONDS + 1
    for _ in range(100):
        queue.push(make_request("chat", held_at=now))
    first = [request.priority for request in serve_all(queue, now=now)[:40]]
    assert first.count(5) == 40 // AGED_SHARE


def test_full_queue_rejects_the_newest_of_the_largest_tenant() -> None:
    queue = HoldQueue(10, 1000)
    flood = [make_request("flood") for _ in range(10)]
    for request in flood:
        assert queue.push(request) == []
    extra = make_request("flood")
    assert queue.push(extra) == [extra]
    assert queue.push(make_request("other")) == [flood[-1]]
    assert queue.push(make_request("urgent", priority=-1)) == [flood[-2]]
    assert len(queue) == 10


def test_full_bytes_reject_the_tenant_with_the_most_bytes() -> None:
    queue = HoldQueue(1000, 100)
    large = make_request("large", num_bytes=60)
    queue.push(large)
    for _ in range(5):
        assert queue.push(make_request("small", num_bytes=8)) == []
    assert queue.push(make_request("small", num_bytes=8)) == [large]
    assert queue.num_bytes == 48


def test_expired_requests_are_found_in_every_band() -> None:
    queue = HoldQueue(100, 100)
    requests = [make_request(tenant, band, held_at=at) for tenant in "ab" for band in (0, 1) for at in (1.0, 2.0, 9.0)]
    for request in requests:
        queue.push(request)
    assert {id(request) for request in queue.expired(5.0)} == {id(each) for each in requests if each.held_at < 5}
    assert queue.oldest() == 1.0


def test_returned_requests_keep_the_order_of_arrival() -> None:
    queue = HoldQueue(100, 100)
    requests = [make_request(held_at=float(number)) for number in range(5)]
    for request in requests:
        queue.push(request)
    first, second = (queue.head(0.0) for _ in range(2))
    for request in requests[:3]:
        queue.remove(request)
    assert first is second is requests[0]
    for place in (1, 2, 0):
        queue.push_front(requests[place])
    assert serve_all(queue) == requests


PUSHES = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "push", "front", "serve", "leave"]),
        st.sampled_from("abcd"),
        st.integers(-1, 1),
        st.integers(0, 30),
        st.sampled_from([0.0, 10.0, 3000.0, 100_000.0]),
    ),
    max_size=120,
)


@given(PUSHES, st.integers(1, 12), st.integers(30, 120))
def test_queue_keeps_order_bounds_and_counts(
    steps: list[tuple[str, str, int, int, float]], most: int, size: int
) -> None:
    """In any sequence of arrivals, services and departures nothing is lost, and a tenant's order is kept."""
    queue = HoldQueue(most, size)
    alive: dict[tuple[int, str], list[HeldRequest]] = defaultdict(list)

    def forget(request: HeldRequest) -> None:
        alive[request.priority, request.tenant].remove(request)

    returned: list[HeldRequest] = []
    for now, (action, tenant, priority, num_bytes, cost) in enumerate(steps):
        if action == "push":
            request = make_request(tenant, priority, num_bytes, float(now))
            alive[priority, tenant].append(request)
            for rejected in queue.push(request):
                forget(rejected)
            assert len(queue) <= most + len(returned)
        elif action == "front" and returned:
            request = returned.pop()
            insort(alive[request.priority, request.tenant], request, key=lambda each: each.held_at)
            queue.push_front(request)
        elif action == "serve" and (head := queue.head(float(now))) is not None:
            mine = alive[head.priority, head.tenant]
            assert mine[0] is head
            queue.serve(head, cost)
            forget(head)
            returned.append(head)
        elif action == "leave" and len(queue):
            request = list(queue)[num_bytes % len(queue)]
            queue.remove(request)
            assert request not in queue
            forget(request)
        left = [request for each in alive.values() for request in each]
        assert len(queue) == len(left)
        assert queue.num_bytes == sum(request.num_bytes for request in left)
        assert all(request in queue for request in left)
    order = serve_all(queue, now=float(len(steps)))
    assert len(order) == sum(map(len, alive.values()))
    for key, mine in alive.items():
        assert [request for request in order if (request.priority, request.tenant) == key] == mine


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 30_000)), min_size=1, max_size=300))
def test_backlogged_tenants_differ_by_a_request_and_a_quantum(costs: list[tuple[str, float]]) -> None:
    queue = HoldQueue(10_000, 10_000)
    pending: dict[str, list[float]] = defaultdict(list)
    for tenant, cost in costs:
        pending[tenant].append(cost)
        queue.push(make_request(tenant))
    served: Counter[str] = Counter()
    largest = max(*(cost for _, cost in costs), MIN_COST_TOKENS)
    while len(queue):
        backlogged = [tenant for tenant, left in pending.items() if left]
        if len(backlogged) == len(pending):
            for first, second in pairwise(backlogged):
                assert abs(served[first] - served[second]) <= 2 * (largest + QUANTUM_TOKENS)
        head = queue.head(0.0)
        assert head is not None
        cost = pending[head.tenant].pop(0)
        queue.serve(head, cost)
        served[head.tenant] += max(cost, MIN_COST_TOKENS)  # type: ignore[assignment]
