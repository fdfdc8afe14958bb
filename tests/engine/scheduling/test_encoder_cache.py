"""Encoder cache: images are computed once, whole, in steps with room, and cached while read."""

import pytest
from trimtab_engine.errors import InvalidRequest
from trimtab_engine.multimodal.items import MultiModalItem, Span
from trimtab_engine.scheduling.batch import Batch
from trimtab_engine.scheduling.block_manager import BlockManager
from trimtab_engine.scheduling.encoder_cache import EncoderCache, key_of
from trimtab_engine.scheduling.policy import SchedulingPolicy
from trimtab_engine.scheduling.prefix_hash import extend_block_hashes
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.scheduling.scheduler import Scheduler
from trimtab_engine.scheduling.stats import BlockedReason

BLOCK_SIZE = 4


def an_image(name: str, num_tokens: int = 4) -> MultiModalItem:
    return MultiModalItem("image", name.encode(), num_tokens, (1, 2, 2 * num_tokens), None)


def a_request(*parts: int | MultiModalItem, salt: str = "", name: str = "r", max_tokens: int = 4) -> Request:
    """Return a request with images between runs of text tokens."""
    prompt: list[int] = []
    spans: list[Span] = []
    for part in parts:
        if isinstance(part, int):
            prompt += range(10, 10 + part)
        else:
            spans.append(Span(len(prompt), part))
            prompt += [9] * part.num_tokens
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return Request.of(name, prompt, sampling, arrival_time=0.0, cache_salt=salt, spans=tuple(spans))


def a_scheduler(
    encoder: EncoderCache | None, *, num_batched_tokens: int = 64, chunked: bool = True, num_blocks: int = 64
) -> Scheduler:
    policy = SchedulingPolicy(max_num_seqs=4, max_num_batched_tokens=num_batched_tokens)
    blocks = BlockManager(num_blocks, num_blocks, BLOCK_SIZE)
    return Scheduler(blocks, policy, max_model_len=64, enable_chunked_prefill=chunked, encoder=encoder)


def a_step(scheduler: Scheduler) -> tuple[dict[str, int], list[str]]:
    """Run one step; return the tokens per request and the computed images."""
    batch = scheduler.schedule(0.0)
    computed = {s.request.request_id: s.num_tokens for s in batch.sequences}, names_of(batch)
    scheduler.update(batch, [7] * len(batch.sampling), 0.0)
    scheduler.check_integrity()
    return computed


def names_of(batch: Batch) -> list[str]:
    return [item.content_hash.decode() for _, item in batch.missing]


def test_image_is_computed_whole_in_first_step() -> None:
    scheduler = a_scheduler(EncoderCache(16, 16), num_batched_tokens=5)
    scheduler.add(a_request(3, an_image("a", 6), 2))
    assert [a_step(scheduler) for _ in range(3)] == [({"r": 5}, ["a"]), ({"r": 5}, []), ({"r": 1}, [])]


def test_two_requests_with_one_image_compute_it_once() -> None:
    scheduler = a_scheduler(EncoderCache(16, 16))
    scheduler.add(a_request(3, an_image("a"), 2, name="one"))
    scheduler.add(a_request(1, an_image("a"), an_image("a"), 2, name="two"))
    assert a_step(scheduler) == ({"one": 9, "two": 11}, ["a"])
    stats = scheduler.take_stats()
    assert (stats.num_encoded_items, stats.num_encoded_tokens) == (1, 4)


def test_idle_items_are_evicted_in_lru_order() -> None:
    cache = EncoderCache(12, 12)
    scheduler = a_scheduler(cache)
    for number, image in enumerate(["a", "b", "c", "a", "d", "b"]):  # d takes the room of b, not of a
        scheduler.add(a_request(2, an_image(image), 1, name=f"{number}", max_tokens=1))
    taken = []
    scheduler.set_policy(SchedulingPolicy(max_num_seqs=1, max_num_batched_tokens=64))
    while not scheduler.is_idle:
        taken.append(a_step(scheduler)[1])
    assert taken == [["a"], ["b"], ["c"], [], ["d"], ["b"]]
    assert cache.num_kept_tokens == 12


def test_a_prompt_stops_before_an_image_that_the_step_has_no_budget_for() -> None:
    scheduler = a_scheduler(EncoderCache(16, 6))
    scheduler.add(a_request(3, an_image("a"), 2, an_image("b"), 1))
    assert [a_step(scheduler) for _ in range(2)] == [({"r": 9}, ["a"]), ({"r": 5}, ["b"])]


def test_prompt_stops_before_image_without_room() -> None:
    scheduler = a_scheduler(EncoderCache(6, 16))
    scheduler.add(a_request(3, an_image("a"), 2, an_image("b"), 1))
    assert [a_step(scheduler) for _ in range(2)] == [({"r": 9}, ["a"]), ({"r": 5}, ["b"])]


def test_request_waiting_for_room_blocks_later_items() -> None:
    """Otherwise a large image would starve because of many small ones."""
    scheduler = a_scheduler(EncoderCache(8, 8), num_batched_tokens=12)
    scheduler.add(a_request(6, an_image("small"), 1, name="first"))
    scheduler.add(a_request(2, an_image("large", 8), 1, name="large"))
    for number in range(4):
        scheduler.add(a_request(1, an_image(f"s{number}", 2), 1, name=f"{number}"))
    assert a_step(scheduler) == ({"first": 11, "large": 1}, ["small"])
    computed, images = a_step(scheduler)
    assert images == ["large"]
    assert computed["large"] == 10


def test_head_with_image_reports_blocked_reason() -> None:
    scheduler = a_scheduler(EncoderCache(8, 6))
    scheduler.add(a_request(3, an_image("a", 6), 2, name="one"))
    scheduler.add(a_request(an_image("b", 6), 2, name="two"))
    assert a_step(scheduler) == ({"one": 11}, ["a"])
    scheduler.schedule(5.0)
    assert scheduler.take_stats().blocked_seconds == {BlockedReason.ENCODER.value: 5.0}


def test_decodes_continue_while_image_waits() -> None:
    scheduler = a_scheduler(EncoderCache(4, 4))
    scheduler.add(a_request(3, name="decode", max_tokens=9))
    a_step(scheduler)
    scheduler.add(a_request(an_image("a"), an_image("b"), 2, name="images"))
    assert a_step(scheduler) == ({"decode": 1, "images": 4}, ["a"])
    assert a_step(scheduler) == ({"decode": 1, "images": 6}, ["b"])


def test_preempted_request_reuses_cached_image() -> None:
    scheduler = a_scheduler(EncoderCache(16, 16), num_batched_tokens=5)
    scheduler.add(a_request(3, an_image("a", 6), 2))
    a_step(scheduler)
    scheduler.preempt_all(0.0)
    scheduler.reset_prefix_cache()
    scheduler.check_integrity()
    assert a_step(scheduler) == ({"r": 5}, [])


def test_failed_request_items_are_recomputed() -> None:
    scheduler = a_scheduler(EncoderCache(16, 16))
    failed = a_request(1, an_image("a"), 1, name="failed")
    scheduler.add(failed)
    a_step(scheduler)
    scheduler.invalidate_blocks(failed)
    scheduler.abort(["failed"])
    scheduler.add(a_request(1, an_image("a"), 1, name="next"))
    batch = scheduler.schedule(0.0)
    assert (batch.displaced, names_of(batch)) == ([b"a"], ["a"])


def test_tenants_share_no_embeddings() -> None:
    scheduler = a_scheduler(EncoderCache(16, 16))
    for name, salt in (("one", "x"), ("two", "y"), ("three", "x")):
        scheduler.add(a_request(1, an_image("a"), 1, name=name, salt=salt))
    assert a_step(scheduler)[1] == ["a", "a"]
    assert key_of(a_request(1), an_image("a")) == b"a"


def test_a_cached_prefix_that_ends_in_an_image_has_it_computed_for_the_rest() -> None:
    scheduler = a_scheduler(EncoderCache(8, 8))
    scheduler.add(a_request(3, an_image("a", 8), 1, name="one", max_tokens=1))
    scheduler.add(a_request(3, an_image("b", 8), 1, name="two", max_tokens=1))
    while not scheduler.is_idle:
        a_step(scheduler)
    again = a_request(3, an_image("a", 8), 1, name="again", max_tokens=1)
    scheduler.add(again)
    batch = scheduler.schedule(0.0)
    assert again.num_cached_tokens == 8
    assert (batch.displaced, names_of(batch)) == ([b"b"], ["a"])


@pytest.mark.parametrize(
    ("encoder", "chunked", "words"),
    [
        (None, True, "this model does not support"),
        (EncoderCache(16, 7), True, "takes 8 tokens, and the largest that is computed 7"),
        (EncoderCache(7, 16), True, "takes 8 tokens, and the largest that is computed 7"),
        (EncoderCache(11, 12), False, "take 12 tokens together, and without chunked prefill .* 11 tokens at most"),
    ],
)
def test_images_that_no_step_could_compute_are_refused(encoder: EncoderCache | None, chunked: bool, words: str) -> None:
    scheduler = a_scheduler(encoder, chunked=chunked)
    with pytest.raises(InvalidRequest, match=words):
        scheduler.add(a_request(1, an_image("a", 8), an_image("b", 4), 1))
    assert scheduler.is_idle


def test_unchunked_prefill_computes_all_images_in_one_step() -> None:
    scheduler = a_scheduler(EncoderCache(12, 12), chunked=False)
    scheduler.add(a_request(1, an_image("a", 8), name="one"))
    scheduler.add(a_request(an_image("b"), an_image("c"), 1, name="two"))
    assert a_step(scheduler) == ({"one": 9}, ["a"])
    assert a_step(scheduler) == ({"one": 1, "two": 9}, ["b", "c"])


def hashes_of(request: Request, block_size: int = BLOCK_SIZE) -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, request.token_ids, block_size, request.num_tokens, request.cache_salt, request.spans)
    return hashes


def test_blocks_are_found_again_only_with_the_same_images_in_and_before_them() -> None:
    one, two = (hashes_of(a_request(5, an_image(name, 6), 9)) for name in "ab")
    assert [a == b for a, b in zip(one, two, strict=True)] == [True, False, False, False, False]
    assert one == hashes_of(a_request(5, an_image("a", 6), 9))


def test_an_image_of_another_grid_or_at_another_place_is_another_one() -> None:
    image = MultiModalItem("image", b"a", 4, (1, 2, 8), None)
    turned = MultiModalItem("image", b"a", 4, (1, 8, 2), None)
    assert hashes_of(a_request(image, 4)) != hashes_of(a_request(turned, 4))
    tokens = [9] * 12  # one placeholder id for all items
    places = [Request.of("r", tokens, Sampling(), arrival_time=0.0, spans=(Span(offset, image),)) for offset in (1, 2)]
    assert hashes_of(places[0])[0] != hashes_of(places[1])[0]
