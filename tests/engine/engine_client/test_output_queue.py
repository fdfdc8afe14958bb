"""Output queue: order, merged plain tokens, and no missed wake-up."""

import asyncio

from trimtab_engine.engine_client.output_queue import MAX_RUN_TOKENS, OutputQueue, PlainRun
from trimtab_engine.messages.requests import SequenceOutput

FIRST, LAST = SequenceOutput("r", [1]), SequenceOutput("r", [9], "length")


async def test_plain_tokens_merge_between_other_outputs() -> None:
    mailbox = OutputQueue()
    mailbox.put(FIRST)
    for token_id in (2, 3):
        mailbox.put_plain(token_id, token_id / 10, 0)
    mailbox.put(LAST)
    assert [await mailbox.get() for _ in range(3)] == [FIRST, PlainRun(0, [2, 3], [0.2, 0.3]), LAST]


async def test_a_run_that_was_taken_grows_no_more() -> None:
    mailbox = OutputQueue()
    mailbox.put_plain(2, 0.2, 0)
    taken = await mailbox.get()
    mailbox.put_plain(3, 0.3, 0)
    assert taken == PlainRun(0, [2], [0.2])
    assert await mailbox.get() == PlainRun(0, [3], [0.3])


async def test_waiting_reader_takes_all_queued_outputs() -> None:
    mailbox = OutputQueue()
    waiting = asyncio.ensure_future(mailbox.get())
    await asyncio.sleep(0)
    mailbox.put_plain(2, 0.2, 0)
    mailbox.put_plain(3, 0.3, 0)
    assert await waiting == PlainRun(0, [2, 3], [0.2, 0.3])


async def test_cancelled_reader_loses_no_output() -> None:
    mailbox = OutputQueue()
    waiting = asyncio.ensure_future(mailbox.get())
    await asyncio.sleep(0)
    waiting.cancel()
    mailbox.put(None)
    assert await mailbox.get() is None


async def test_backlog_lets_other_tasks_run_between_bounded_runs() -> None:
    mailbox = OutputQueue()
    for token_id in range(3 * MAX_RUN_TOKENS):
        mailbox.put_plain(token_id, 0.1, 0)
    turns = 0

    async def another() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(another())
    taken = [await mailbox.get() for _ in range(3)]
    task.cancel()
    assert [len(run.token_ids) for run in taken if isinstance(run, PlainRun)] == [MAX_RUN_TOKENS] * 3
    assert turns >= 3
