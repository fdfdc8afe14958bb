"""The registry without streams: own dispatches are the load, dispatched keys the caches."""

from trimtab_router.endpoints.endpoint import Endpoint
from trimtab_router.protocol.messages import Hello, KeyRule, Load, Snapshot
from trimtab_router.protocol.prefix_keys import CUT_BYTES, KEY_RULE, api_key_salt, prompt_keys
from trimtab_router.scoring.state import RoutedRequest
from trimtab_router.state_stream.registry import DEFAULT_BYTES_PER_TOKEN, Registry
from trimtab_router.state_stream.replica import EXPECTED_SECONDS, MAX_APPROXIMATE_KEYS

TEXT = "The quick brown fox jumps over the lazy dog. " * 60


def make_endpoint(name: str, *, host: str = "10.0.0.1", ready: bool = True) -> Endpoint:
    return Endpoint(name, host, 8000, None, ready)


def make_registry(*names: str) -> Registry:
    registry = Registry(served_models=["base"])
    registry.set_endpoints([make_endpoint(name) for name in names])
    return registry


def test_unready_and_removed_endpoints_are_not_usable() -> None:
    registry = make_registry("a", "b", "c")
    registry.set_endpoints([make_endpoint("a"), make_endpoint("b", ready=False)])
    assert [state.replica for state in registry.replicas(0.0)] == ["a"]


def test_unready_endpoint_keeps_its_dispatches() -> None:
    registry = make_registry("a")
    registry.dispatched("a", RoutedRequest(10), 0.0)
    registry.set_endpoints([make_endpoint("a", ready=False)])
    registry.set_endpoints([make_endpoint("a")])
    assert registry.replicas(0.0)[0].pending_requests == 1


def test_dispatch_counts_as_credit_until_finished() -> None:
    registry = make_registry("a")
    (state,) = registry.replicas(0.0)
    first = registry.dispatched("a", RoutedRequest(100), 0.0)
    second = registry.dispatched("a", RoutedRequest(50), 0.0)
    assert (state.pending_requests, state.pending_prefill_tokens, state.pending_context_tokens) == (2, 150.0, 150.0)
    registry.first_byte("a", first)
    assert (state.pending_requests, state.pending_prefill_tokens, state.pending_context_tokens) == (2, 50.0, 150.0)
    for number in (first, first, second):
        registry.finished("a", number)
    assert (state.pending_requests, state.pending_prefill_tokens, state.pending_context_tokens) == (0, 0.0, 0.0)


def test_dispatch_counts_uncached_tokens_only() -> None:
    registry = make_registry("a")
    request = registry.routed_request({"prompt": TEXT})
    registry.dispatched("a", request, 0.0)
    before = registry.replicas(0.0)[0].pending_prefill_tokens
    registry.dispatched("a", request, 0.0)
    assert registry.replicas(0.0)[0].pending_prefill_tokens - before < 0.25 * request.prompt_tokens


def test_dispatched_keys_stay_known_without_a_stream() -> None:
    registry = make_registry("a", "b")
    request = registry.routed_request({"prompt": TEXT})
    registry.dispatched("b", request, 0.0)
    bit = next(state.index for state in registry.replicas(0.0) if state.replica == "b")
    assert registry.index.match(request.keys, EXPECTED_SECONDS + 1) == {bit: len(request.keys)}


def test_approximate_keys_are_bounded_by_least_recent_use() -> None:
    registry = make_registry("a")
    registry.dispatched("a", RoutedRequest(1, keys=(1, 2)), 0.0)
    registry.dispatched("a", RoutedRequest(1, keys=(3,)), 0.0)
    registry.dispatched("a", RoutedRequest(1, keys=(1, 2)), 0.0)
    registry.dispatched("a", RoutedRequest(1, keys=tuple(range(10, 10 + MAX_APPROXIMATE_KEYS - 2))), 0.0)
    later = EXPECTED_SECONDS + 1
    assert registry.index.num_keys(0) == MAX_APPROXIMATE_KEYS
    assert [registry.index.match((key,), later) for key in (1, 2, 3)] == [{0: 1}, {0: 1}, {}]


def test_endpoint_at_another_address_is_a_new_replica() -> None:
    registry = make_registry("a")
    registry.dispatched("a", registry.routed_request({"prompt": TEXT}), 0.0)
    registry.set_endpoints([make_endpoint("a", host="10.0.0.2")])
    (state,) = registry.replicas(0.0)
    assert (state.pending_requests, registry.index.num_keys(state.index)) == (0, 0)


def test_bits_of_removed_replicas_are_reused() -> None:
    registry = make_registry("a", "b")
    registry.set_endpoints([make_endpoint("b")])
    registry.set_endpoints([make_endpoint("b"), make_endpoint("c"), make_endpoint("d")])
    assert sorted(state.index for state in registry.replicas(0.0)) == [0, 1, 2]


def test_unknown_replica_and_number_are_ignored() -> None:
    registry = make_registry("a")
    number = registry.dispatched("gone", RoutedRequest(1), 0.0)
    registry.finished("gone", number)
    registry.finished("a", 77)
    assert registry.state_age("a", 0.0) is None
    assert registry.state_age("gone", 0.0) is None


def test_change_is_reported_when_endpoints_or_requests_change() -> None:
    changes: list[int] = []
    registry = Registry(on_change=lambda: changes.append(1))
    registry.set_endpoints([make_endpoint("a")])
    registry.finished("a", registry.dispatched("a", RoutedRequest(1), 0.0))
    assert len(changes) == 2


def test_request_has_estimated_tokens_and_keys_of_its_model() -> None:
    registry = make_registry()
    request = registry.routed_request({"model": "base", "prompt": TEXT, "max_tokens": 7}, tenant="t", session="s")
    assert request.prompt_tokens == round(len(TEXT) / DEFAULT_BYTES_PER_TOKEN)
    assert request.keys == prompt_keys({"prompt": TEXT})[0].keys
    assert (request.max_tokens, request.adapter, request.tenant, request.session) == (7, None, "t", "s")
    adapted = registry.routed_request({"model": "french", "prompt": TEXT})
    assert (adapted.adapter, adapted.keys) == ("french", prompt_keys({"prompt": TEXT}, adapter="french")[0].keys)


def connect(registry: Registry, name: str, rule: KeyRule, bytes_per_token: float) -> None:
    """Receive what the engine of that name would send first."""
    for message in (Hello(1, "e", [0], 16, rule), Snapshot(0, 0, Load(bytes_per_token=bytes_per_token))):
        registry._replicas[name].receive(message, 0.0)
        registry._learn(message)


def test_lying_engine_cannot_change_shared_values() -> None:
    registry = make_registry("a", "b", "c")
    for name in ("a", "b"):
        connect(registry, name, KeyRule(KEY_RULE, CUT_BYTES, ["alias"]), 4.0)
    honest = registry.routed_request({"model": "french", "prompt": TEXT}, api_key=b"secret")
    for ratio in (1e-300, 1e300):
        connect(registry, "c", KeyRule(KEY_RULE, CUT_BYTES, ["french"], separates_api_keys=True), ratio)
        assert registry.routed_request({"model": "french", "prompt": TEXT}, api_key=b"secret") == honest
    assert registry.routed_request({"model": "alias", "prompt": TEXT}).adapter is None


def test_request_of_token_ids_has_exact_length() -> None:
    request = make_registry().routed_request({"prompt": [[1] * 300, [2] * 5]})
    assert (request.prompt_tokens, len(request.keys), request.tokens_per_key) == (305, 2, 128.0)


def test_request_without_prompt_has_no_keys() -> None:
    request = make_registry().routed_request({"input": TEXT, "max_tokens": "many", "model": 5})
    assert (request.prompt_tokens, request.keys, request.max_tokens) == (0, (), None)


def test_api_key_is_no_salt_unless_engine_separates_keys() -> None:
    request = make_registry().routed_request({"prompt": TEXT}, api_key=b"secret")
    assert request.keys == prompt_keys({"prompt": TEXT})[0].keys
    assert request.keys != prompt_keys({"prompt": TEXT}, salt=api_key_salt(b"secret"))[0].keys
