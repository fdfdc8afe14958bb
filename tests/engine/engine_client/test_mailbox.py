"""Where outputs wait: in order, plain tokens together, and nobody sleeps beside a full box."""

import asyncio

from trimtab_engine.engine_client.mailbox import Mailbox, PlainRun
from trimtab_engine.messages import SequenceOutput

FIRST, LAST = SequenceOutput("r", [1]), SequenceOutput("r", [9], "length")


async def test_plain_tokens_pile_up_to_one_run_between_what_else_comes() -> None:
    mailbox = Mailbox()
    mailbox.put(FIRST)
    for token_id in (2, 3):
        mailbox.put_plain(token_id, token_id / 10, 0)
    mailbox.put(LAST)
    assert [await mailbox.get() for _ in range(3)] == [FIRST, PlainRun(0, [2, 3], [0.2, 0.3]), LAST]


async def test_a_run_that_was_taken_grows_no_more() -> None:
    mailbox = Mailbox()
    mailbox.put_plain(2, 0.2, 0)
    taken = await mailbox.get()
    mailbox.put_plain(3, 0.3, 0)
    assert taken == PlainRun(0, [2], [0.2])
    assert await mailbox.get() == PlainRun(0, [3], [0.3])


async def test_who_waits_is_woken_and_takes_all_that_came_until_it_runs() -> None:
    mailbox = Mailbox()
    waiting = asyncio.ensure_future(mailbox.get())
    await asyncio.sleep(0)
    mailbox.put_plain(2, 0.2, 0)
    mailbox.put_plain(3, 0.3, 0)
    assert await waiting == PlainRun(0, [2, 3], [0.2, 0.3])


async def test_who_gives_up_waiting_loses_nothing() -> None:
    mailbox = Mailbox()
    waiting = asyncio.ensure_future(mailbox.get())
    await asyncio.sleep(0)
    waiting.cancel()
    mailbox.put(None)
    assert await mailbox.get() is None
