"""Compilation of grammars to matchers, outside the engine core's loop: a build may take as long as the validation
allows.

A request with a recently used grammar starts at once, with a copy. Others wait here, outside the scheduler, until
take_ready() returns them before a step.
"""

import concurrent.futures
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLTokenizer

from trimtab_engine.scheduling.request import Request
from trimtab_engine.structured.deep_stack import deep_stack_executor
from trimtab_engine.structured.matcher import GrammarMatcher, Vocabulary

MAX_CACHED_GRAMMARS = 16  # 1 to 2 MB each after 250 tokens of hostile requests; a rebuild usually takes 5 ms
MAX_CACHED_CHARACTERS = 4 << 20  # total size of their texts; the built matchers are larger
QUICK_BUILD_SECONDS = 0.005  # per step; most builds finish within it, and waiting is cheaper than deferring a request

logger = logging.getLogger("trimtab_engine.core")


class GrammarCompiler:
    """Builds matchers in one thread. `vocabulary` is called there with the first grammar."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._cache: OrderedDict[str, GrammarMatcher | None] = OrderedDict()
        self._building: dict[str, Future[GrammarMatcher]] = {}
        self._waiting: dict[str, Request] = {}
        self._quick_seconds = QUICK_BUILD_SECONDS
        """How long start() may still wait before the next step."""

    @property
    def num_waiting(self) -> int:
        """Requests whose grammar is being built."""
        return len(self._waiting)

    @property
    def num_cached(self) -> int:
        return len(self._cache)

    def start(self, request: Request) -> bool:
        """Attach the matcher and return True, or return False if the grammar is being built; take_ready() then returns
        the request.

        A grammar that cannot be built leaves `request.grammar` None, or attaches a matcher with an error.
        """
        grammar = request.sampling.grammar
        assert grammar is not None
        building = self._building.get(grammar)
        if grammar not in self._cache and building is None:
            building = self._building[grammar] = self._submit(grammar)
            before = time.monotonic()
            concurrent.futures.wait([building], self._quick_seconds)
            self._quick_seconds = max(0.0, self._quick_seconds - (time.monotonic() - before))
            self._collect()
        if grammar in self._cache:
            self._cache.move_to_end(grammar)
            self._attach(request, grammar)
            return True
        self._waiting[request.request_id] = request
        return False

    def take_ready(self) -> list[Request]:
        """Return requests whose grammar has been built since the last call, in order of arrival."""
        self._quick_seconds = QUICK_BUILD_SECONDS
        if not self._waiting:
            return []
        self._collect()
        ready = [request for request in self._waiting.values() if request.sampling.grammar in self._cache]
        for request in ready:
            del self._waiting[request.request_id]
            self._attach(request, request.sampling.grammar or "")
        self._trim()
        return ready

    def forget(self, request_ids: Iterable[str]) -> list[Request]:
        """Stop waiting for these requests' grammars. Return those that were waiting."""
        return [request for key in request_ids if (request := self._waiting.pop(key, None)) is not None]

    def waiting_requests(self) -> list[Request]:
        """Return requests whose grammar is not built yet."""
        return list(self._waiting.values())

    def waiting_request_ids(self) -> list[str]:
        return list(self._waiting)

    def _attach(self, request: Request, grammar: str) -> None:
        prototype = self._cache[grammar]
        request.grammar = None if prototype is None else prototype.copy()

    def _submit(self, grammar: str) -> "Future[GrammarMatcher]":
        if self._executor is None:
            self._executor = deep_stack_executor("grammar-build")
        return self._executor.submit(self._build, grammar)

    def _build(self, grammar: str) -> GrammarMatcher:
        if self._tokenizer is None:
            self._tokenizer = self._vocabulary().build()
        return GrammarMatcher.of(self._tokenizer, grammar)

    def _collect(self) -> None:
        """Move built matchers into the cache; None represents a failed build."""
        for grammar in [grammar for grammar, future in self._building.items() if future.done()]:
            future = self._building.pop(grammar)
            error = future.exception()
            if error is not None:  # tokenizer files have changed, because the API server has read them
                logger.error("cannot build a grammar: %s", error)
            self._cache[grammar] = None if error is not None else future.result()
        if not self._waiting:
            self._trim()

    def _trim(self) -> None:
        """Evict least recently used entries until the cache is within its limits. The newest stays, whatever its
        size.
        """
        num_characters = sum(map(len, self._cache))
        while len(self._cache) > 1 and (
            len(self._cache) > MAX_CACHED_GRAMMARS or num_characters > MAX_CACHED_CHARACTERS
        ):
            grammar, _ = self._cache.popitem(last=False)
            num_characters -= len(grammar)
