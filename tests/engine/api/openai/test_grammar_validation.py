"""Grammars that would hang, explode or crash are rejected in time by killable processes."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

import pytest
from trimtab_engine.api.http.errors import ApiError
from trimtab_engine.api.openai import grammar_validation
from trimtab_engine.api.openai.constraints import Constraint
from trimtab_engine.api.openai.grammar_validation import GrammarValidator
from trimtab_engine.ipc.bounded_worker import WorkerLimits
from trimtab_engine.structured.vocabulary import read_vocabulary

STARTED = Constraint("regex", "started")
DEEP_RULES = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(5000)) + 'r5000: "a"\n'
SLOW_SCHEMA = '{"type":"integer","multipleOf":999983}'  # builds for 9 s
CHECK_SECONDS = 3.0  # a hundred times what the others take, for busy machines
SLACK_SECONDS = 60.0


@pytest.fixture
async def validator(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GrammarValidator]:
    """A validator with a running process and a few seconds per check."""
    monkeypatch.setattr(grammar_validation, "LIMITS", WorkerLimits(seconds=CHECK_SECONDS, max_workers=1, max_waiting=2))
    vocabulary = asdict(read_vocabulary(str(tokenizer_folder), 258, (256,)))
    validator = GrammarValidator(lambda: vocabulary)
    await validator.grammar(STARTED)
    yield validator
    await validator.close()


async def rejection(validator: GrammarValidator, constraint: Constraint) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await validator.grammar(constraint, "guided_grammar")
    return refused.value


async def test_lone_surrogate_is_rejected(validator: GrammarValidator) -> None:
    error = await rejection(validator, Constraint("regex", "\ud800"))
    assert error.status == 400
    assert "surrogate" in error.message


async def test_valid_grammar_is_returned_in_llguidance_form(validator: GrammarValidator) -> None:
    assert await validator.grammar(Constraint("choice", ("a", "b"))) == 'start: "a" | "b"'


async def test_invalid_grammar_is_400_with_reason(validator: GrammarValidator) -> None:
    error = await rejection(validator, Constraint("regex", "(a"))
    assert (error.status, error.param) == (400, "guided_grammar")
    assert "unclosed group" in error.message


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Constraint("json", SLOW_SCHEMA), "more than 3 s"),
        (Constraint("grammar", DEEP_RULES), "its process ended"),  # overflows the stack
        (Constraint("json", '{"enum":[' + ",".join(f'"v{i}"' for i in range(100_000)) + "]}"), "not usable"),
    ],
)
async def test_endless_or_crashing_grammar_is_400_and_next_is_checked(
    validator: GrammarValidator, constraint: Constraint, reason: str
) -> None:
    error = await rejection(validator, constraint)
    assert error.status == 400
    assert reason in error.message
    assert await validator.grammar(Constraint("regex", "a+"))


async def test_other_requests_continue_during_a_check(validator: GrammarValidator) -> None:
    slow = asyncio.create_task(rejection(validator, Constraint("json", SLOW_SCHEMA)))
    known = await asyncio.wait_for(validator.grammar(STARTED), SLACK_SECONDS)
    assert known
    assert not slow.done()
    await slow


async def test_too_many_concurrent_checks_are_503(validator: GrammarValidator) -> None:
    tasks = [asyncio.create_task(validator.grammar(Constraint("regex", f"a{{{n}}}"))) for n in range(1, 9)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [result for result in results if isinstance(result, ApiError)]
    assert errors
    assert {error.status for error in errors} == {503}
    assert all(error.retry_after for error in errors)
    assert any(isinstance(result, str) for result in results)


async def test_result_cache_is_bounded(validator: GrammarValidator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_validation, "MAX_CACHED_RESULTS", 3)
    for number in range(1, 8):
        await validator.grammar(Constraint("regex", f"b{{{number}}}"))
    assert validator.num_cached_results == 3


async def test_cancelled_check_leaves_no_answer_for_the_next(validator: GrammarValidator) -> None:
    task = asyncio.create_task(validator.grammar(Constraint("json", SLOW_SCHEMA)))
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert "zz" in await validator.grammar(Constraint("regex", "zz"))
