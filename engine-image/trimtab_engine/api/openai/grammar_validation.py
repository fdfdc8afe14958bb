"""Validation of client grammars in a subprocess with a time limit, before they reach the engine core; results are
cached.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from trimtab_engine.api.http.errors import ApiError, invalid
from trimtab_engine.api.openai.constraints import Constraint
from trimtab_engine.ipc.bounded_worker import WorkerError, WorkerLimits, WorkerPool, WorkersBusy

LIMITS = WorkerLimits(seconds=2.0, max_workers=2, max_waiting=64)
MAX_CACHED_RESULTS = 256
MAX_CACHED_CHARACTERS = 8 << 20
RETRY_SECONDS = 2
MODULE = "trimtab_engine.structured.validation"


class GrammarValidator:
    """Cache of validation results. `start` returns the initial message of a worker: the vocabulary
    (structured/validation.py). The first worker starts with the first grammar.
    """

    def __init__(self, start: Callable[[], Any]) -> None:
        self._make_start = start
        self._pool: WorkerPool | None = None
        self._known: OrderedDict[Constraint, dict[str, str]] = OrderedDict()
        self._num_characters = 0

    async def grammar(self, constraint: Constraint, param: str | None = None) -> str:
        """Return llguidance's form of the constraint.

        Raises:
            ApiError: 400 if it is invalid, matches nothing or is too expensive; 503 if too many checks wait.
        """
        answer = self._known.get(constraint)
        if answer is None:
            answer = await self._try(constraint, param)
        else:
            self._known.move_to_end(constraint)
        if "grammar" not in answer:
            raise invalid(f"the {constraint.kind} constraint is not usable: {_reason(answer)}", param)
        return answer["grammar"]

    async def _try(self, constraint: Constraint, param: str | None) -> dict[str, str]:
        if self._pool is None:
            self._pool = WorkerPool(MODULE, self._make_start(), LIMITS)
        try:
            answer: dict[str, str] = await self._pool.call(constraint.to_json())
        except WorkersBusy:
            raise ApiError(
                503, "too many grammars are waiting to be checked; retry later", param=param, retry_after=RETRY_SECONDS
            ) from None
        except WorkerError as error:  # not cached: machine load may be the cause
            raise invalid(
                f"the {constraint.kind} constraint is not usable: checking it failed ({error}); simplify it",
                param,
            ) from None
        self._cache_result(constraint, answer)
        return answer

    def _cache_result(self, constraint: Constraint, answer: dict[str, str]) -> None:
        self._known[constraint] = answer
        self._num_characters += _size(answer)
        while len(self._known) > MAX_CACHED_RESULTS or self._num_characters > MAX_CACHED_CHARACTERS:
            _, dropped = self._known.popitem(last=False)
            self._num_characters -= _size(dropped)

    @property
    def num_cached_results(self) -> int:
        return len(self._known)

    async def close(self) -> None:
        """Stop the worker processes."""
        if self._pool is not None:
            await self._pool.close()


def _reason(answer: dict[str, str]) -> str:
    return answer.get("error") or answer.get("failed") or "checking it failed"


def _size(answer: dict[str, str]) -> int:
    return 2 * sum(map(len, answer.values()))  # the constraint's text has about the same size
