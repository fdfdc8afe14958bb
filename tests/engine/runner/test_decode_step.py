"""Steps of nothing but decodes, in columns."""

from engine_builders import a_request
from trimtab_engine.multimodal.positions import RopePositions
from trimtab_engine.runner.decode_step import KNOWN, DecodeLayout, DecodeStep
from trimtab_engine.scheduling.adapter import Adapter
from trimtab_engine.scheduling.batch import Batch, ScheduledSequence
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.step_inputs import flatten

BLOCK_SIZE = 4


def a_decode(name: str, length: int) -> Request:
    """`length` tokens, of which the newest is to be computed."""
    request = a_request([100 + position for position in range(length)], request_id=name)
    request.block_tables[0] = [10 * length + block for block in range(length)]
    return request


def a_batch(*requests: Request, ahead: int = 0) -> Batch:
    """Return a batch; `ahead`: number of tokens unknown to the host."""
    sequences = [ScheduledSequence(r, r.num_tokens - 1 + ahead, 1, samples=True) for r in requests]
    return Batch(1, sequences, len(requests), [], sampling=list(requests), only_decodes=True)


def laid_out(batch: Batch) -> DecodeStep:
    return DecodeLayout(BLOCK_SIZE).lay_out(batch)


def test_decode_columns_equal_flattened_step() -> None:
    batch = a_batch(a_decode("a", 3), a_decode("b", 9), a_decode("c", 9), a_decode("d", 4))
    step = laid_out(batch)
    step.fill_in()
    expected, _ = flatten(batch.sequences, block_size=BLOCK_SIZE, max_decode_tokens=1 << 30)
    assert step.token_ids.tolist() == expected.token_ids
    assert step.positions.tolist() == expected.positions
    assert step.sampled.tolist() == expected.sampled
    assert step.groups[0].tables == [table for table, _ in expected.groups[0].decodes]
    assert step.shape == expected.shape
    assert list(step.written_slots(BLOCK_SIZE)) == list(expected.written_slots(BLOCK_SIZE))
    assert step.num_context_tokens == batch.num_context_tokens
    assert step.ends.tolist() == [3, 9, 9, 4]


def test_the_order_is_kept_while_the_requests_are_the_same() -> None:
    layout, requests = DecodeLayout(BLOCK_SIZE), [a_decode("a", 3), a_decode("b", 9)]
    first, second = layout.lay_out(a_batch(*requests)), layout.lay_out(a_batch(*requests, ahead=1))
    assert second.by is first.by
    assert second.positions.tolist() == [9, 3]
    assert layout.lay_out(a_batch(requests[0])).by is not first.by


def test_each_token_has_the_slot_of_its_requests_adapter() -> None:
    adapted, plain = a_decode("a", 3), a_decode("b", 9)
    assert laid_out(a_batch(adapted, plain)).by.adapters is None
    adapted.adapter = Adapter("sql", 2, b"")
    step = laid_out(a_batch(adapted, plain))
    assert step.shape.has_adapters
    assert step.by.adapters is not None
    assert step.by.adapters.tolist() == [-1, 2], "longest first"


def test_rope_positions_shift_after_images() -> None:
    seeing, plain = a_decode("a", 9), a_decode("b", 5)
    assert laid_out(a_batch(plain)).rope_positions.tolist() == [4]
    seeing.rope = RopePositions(([], [], []), -3)
    step = laid_out(a_batch(plain, seeing, ahead=1))
    assert step.positions.tolist() == [9, 5]
    assert step.rope_positions.tolist() == [6, 5]


def test_replaced_table_is_read() -> None:
    layout, request = DecodeLayout(BLOCK_SIZE), a_decode("a", 3)
    layout.lay_out(a_batch(request))
    request.block_tables[0] = [7, 8, 9]
    assert layout.lay_out(a_batch(request)).groups[0].tables == [[7, 8, 9]]


def test_following_same_requests_feeds_all_tokens_on_device() -> None:
    requests = [a_decode("a", 3), a_decode("b", 9)]
    step = laid_out(a_batch(*requests, ahead=1))
    step.feed_from(list(requests))
    assert step.sources.tolist() == [1, 0]  # b is longer and first; its token is in row 1


def test_following_other_requests_feeds_available_tokens() -> None:
    known, fed = a_decode("known", 3), a_decode("fed", 9)
    batch = a_batch(known, fed)
    batch.sequences[1].start += 1
    step = laid_out(batch)
    step.feed_from([a_decode("other", 2), fed])
    assert step.sources.tolist() == [1, KNOWN]
    assert step.token_ids.tolist() == [0, 102]


def test_ended_request_computes_unused_token() -> None:
    step = laid_out(a_batch(a_decode("a", 3), ahead=1))
    step.fill_in()
    assert step.token_ids.tolist() == [0]
