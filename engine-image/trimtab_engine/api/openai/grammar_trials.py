"""Grammars of clients, tried in a process that can be killed before the engine core sees them, and remembered."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from trimtab_engine.api.http.errors import ApiError, invalid
from trimtab_engine.api.openai.constraints import Constraint
from trimtab_engine.ipc.bounded_worker import AllBusy, WorkerError, WorkerLimits, WorkerPool

LIMITS = WorkerLimits(seconds=2.0, max_workers=2, max_waiting=64)
MAX_REMEMBERED = 256
MAX_REMEMBERED_CHARACTERS = 8 << 20
RETRY_SECONDS = 2
MODULE = "trimtab_engine.structured.trial"


class GrammarTrials:
    """`start` makes what a trial's process is given first: the vocabulary (structured/trial.py). Its first process
    starts with the first grammar."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._make_start = start
        self._pool: WorkerPool | None = None
        self._known: OrderedDict[Constraint, dict[str, str]] = OrderedDict()
        self._num_characters = 0

    async def grammar(self, constraint: Constraint, param: str | None = None) -> str:
        """llguidance's form of it. ApiError 400 for one that is none, matches nothing or costs too much; 503 when too
        many wait to be tried."""
        answer = self._known.get(constraint)
        if answer is None:
            answer = await self._try(constraint, param)
        else:
            self._known.move_to_end(constraint)
        if "grammar" not in answer:
            raise invalid(f"the {constraint.kind} constraint is refused: {_reason(answer)}", param)
        return answer["grammar"]

    async def _try(self, constraint: Constraint, param: str | None) -> dict[str, str]:
        if self._pool is None:
            self._pool = WorkerPool(MODULE, self._make_start(), LIMITS)
        try:
            answer: dict[str, str] = await self._pool.call(constraint.to_json())
        except AllBusy:
            raise ApiError(
                503, "too many grammars wait to be checked; try again", param=param, retry_after=RETRY_SECONDS
            ) from None
        except WorkerError as error:  # not remembered: a machine under load may have been the reason
            raise invalid(
                f"the {constraint.kind} constraint is refused: checking it did not end well ({error}); make it simpler",
                param,
            ) from None
        self._remember(constraint, answer)
        return answer

    def _remember(self, constraint: Constraint, answer: dict[str, str]) -> None:
        self._known[constraint] = answer
        self._num_characters += _size(answer)
        while len(self._known) > MAX_REMEMBERED or self._num_characters > MAX_REMEMBERED_CHARACTERS:
            _, dropped = self._known.popitem(last=False)
            self._num_characters -= _size(dropped)

    @property
    def num_remembered(self) -> int:
        return len(self._known)

    async def close(self) -> None:
        """End its processes."""
        if self._pool is not None:
            await self._pool.close()


def _reason(answer: dict[str, str]) -> str:
    return answer.get("error") or answer.get("failed") or "its check failed"


def _size(answer: dict[str, str]) -> int:
    return 2 * sum(map(len, answer.values()))  # the constraint's own text is about as long
