"""Grammars that would hang, explode or crash are refused in time, by processes that are there to be killed."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

import pytest
from trimtab_engine.api.http.errors import ApiError
from trimtab_engine.api.openai import grammar_trials
from trimtab_engine.api.openai.constraints import Constraint
from trimtab_engine.api.openai.grammar_trials import GrammarTrials
from trimtab_engine.ipc.bounded_worker import WorkerLimits
from trimtab_engine.structured.vocabulary import read_vocabulary

STARTED = Constraint("regex", "started")
DEEP_RULES = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(5000)) + 'r5000: "a"\n'
SLOW_SCHEMA = '{"type":"integer","multipleOf":999983}'  # builds for 9 s
TRIAL_SECONDS = 3.0  # a hundred times what the others take: machines are slow when much is built on them
SLACK_SECONDS = 60.0


@pytest.fixture
async def trials(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GrammarTrials]:
    """With a process that runs already, and a few seconds for a trial."""
    monkeypatch.setattr(grammar_trials, "LIMITS", WorkerLimits(seconds=TRIAL_SECONDS, max_workers=1, max_waiting=2))
    vocabulary = asdict(read_vocabulary(str(tokenizer_folder), 258, (256,)))
    trials = GrammarTrials(lambda: vocabulary)
    await trials.grammar(STARTED)
    yield trials
    await trials.close()


async def refusal(trials: GrammarTrials, constraint: Constraint) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await trials.grammar(constraint, "guided_grammar")
    return refused.value


async def test_half_a_surrogate_pair_is_refused(trials: GrammarTrials) -> None:
    error = await refusal(trials, Constraint("regex", "\ud800"))
    assert error.status == 400
    assert "surrogate" in error.message


async def test_a_grammar_that_passes_comes_in_llguidances_form(trials: GrammarTrials) -> None:
    assert await trials.grammar(Constraint("choice", ("a", "b"))) == 'start: "a" | "b"'


async def test_what_is_no_grammar_is_400_and_says_why(trials: GrammarTrials) -> None:
    error = await refusal(trials, Constraint("regex", "(a"))
    assert (error.status, error.param) == (400, "guided_grammar")
    assert "unclosed group" in error.message


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Constraint("json", SLOW_SCHEMA), "more than 3 s"),
        (Constraint("grammar", DEEP_RULES), "its process ended"),  # overflows the stack
        (Constraint("json", '{"enum":[' + ",".join(f'"v{i}"' for i in range(100_000)) + "]}"), "refused"),
    ],
)
async def test_a_grammar_that_does_not_end_or_crashes_is_400_and_the_next_one_is_tried(
    trials: GrammarTrials, constraint: Constraint, reason: str
) -> None:
    error = await refusal(trials, constraint)
    assert error.status == 400
    assert reason in error.message
    assert await trials.grammar(Constraint("regex", "a+"))


async def test_others_go_on_while_one_is_tried(trials: GrammarTrials) -> None:
    slow = asyncio.create_task(refusal(trials, Constraint("json", SLOW_SCHEMA)))
    known = await asyncio.wait_for(trials.grammar(STARTED), SLACK_SECONDS)
    assert known
    assert not slow.done()
    await slow


async def test_too_many_at_once_are_503(trials: GrammarTrials) -> None:
    tasks = [asyncio.create_task(trials.grammar(Constraint("regex", f"a{{{n}}}"))) for n in range(1, 9)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [result for result in results if isinstance(result, ApiError)]
    assert errors
    assert {error.status for error in errors} == {503}
    assert all(error.retry_after for error in errors)
    assert any(isinstance(result, str) for result in results)


async def test_what_is_remembered_is_bounded(trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trials, "MAX_REMEMBERED", 3)
    for number in range(1, 8):
        await trials.grammar(Constraint("regex", f"b{{{number}}}"))
    assert trials.num_remembered == 3


async def test_a_cancelled_trial_leaves_no_answer_for_the_next(trials: GrammarTrials) -> None:
    task = asyncio.create_task(trials.grammar(Constraint("json", SLOW_SCHEMA)))
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert "zz" in await trials.grammar(Constraint("regex", "zz"))
