"""Grammars are compiled once, outside the engine's loop, and only their requests wait."""

import threading
from pathlib import Path

import engine_builders
import pytest
from llguidance import LLMatcher
from trimtab_engine.errors import ModelError
from trimtab_engine.scheduling.request import Request
from trimtab_engine.structured import compiler as under_test
from trimtab_engine.structured.compiler import GrammarCompiler
from trimtab_engine.structured.matcher import Vocabulary
from trimtab_engine.structured.vocabulary import read_vocabulary

DEADLINE_SECONDS = 120.0


def make_request(name: str, regex: str = "a+") -> Request:
    return engine_builders.a_request(request_id=name, grammar=LLMatcher.grammar_from_regex(regex))


@pytest.fixture
def vocabulary(tokenizer_folder: Path) -> Vocabulary:
    return read_vocabulary(str(tokenizer_folder), 258, (256,))


class SlowVocabulary:
    """Returns the vocabulary when released."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.go = threading.Event()

    def __call__(self) -> Vocabulary:
        assert self.go.wait(DEADLINE_SECONDS)
        return self._vocabulary


def until_ready(compiler: GrammarCompiler, count: int) -> list[Request]:
    ready: list[Request] = []
    pause = threading.Event()
    for _ in range(int(DEADLINE_SECONDS / 0.001)):
        ready += compiler.take_ready()
        if len(ready) >= count:
            break
        pause.wait(0.001)
    return ready


def test_request_waits_for_its_grammar_and_gets_a_matcher(vocabulary: Vocabulary) -> None:
    slow = SlowVocabulary(vocabulary)
    compiler = GrammarCompiler(slow)
    requests = [make_request("first"), make_request("second")]
    assert [compiler.start(request) for request in requests] == [False, False]
    assert compiler.take_ready() == []
    assert compiler.num_waiting == 2
    slow.go.set()
    assert until_ready(compiler, 2) == requests
    assert all(request.grammar is not None and request.grammar.error is None for request in requests)
    assert requests[0].grammar is not requests[1].grammar
    assert compiler.num_waiting == 0


def test_cached_grammar_starts_at_once(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(lambda: vocabulary)
    if not compiler.start(make_request("first")):
        until_ready(compiler, 1)
    again = make_request("again")
    assert compiler.start(again)
    assert again.grammar is not None


def test_aborted_request_is_forgotten(vocabulary: Vocabulary) -> None:
    slow = SlowVocabulary(vocabulary)
    compiler = GrammarCompiler(slow)
    request = make_request("gone")
    assert not compiler.start(request)
    assert compiler.forget(["gone", "never known"]) == [request]
    slow.go.set()
    assert compiler.num_waiting == 0
    assert compiler.take_ready() == []


def test_invalid_grammar_gives_a_matcher_with_error(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(lambda: vocabulary)
    request = make_request("bad", "(a")
    if not compiler.start(request):
        until_ready(compiler, 1)
    assert request.grammar is not None
    assert request.grammar.error is not None


def test_unreadable_tokenizer_leaves_request_without_matcher() -> None:
    def missing() -> Vocabulary:
        raise ModelError("no tokenizer")

    compiler = GrammarCompiler(missing)
    request = make_request("bad")
    if not compiler.start(request):
        assert until_ready(compiler, 1) == [request]
    assert request.grammar is None


def test_cache_is_bounded(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "MAX_CACHED_GRAMMARS", 3)
    compiler = GrammarCompiler(lambda: vocabulary)
    for number in range(10):
        if not compiler.start(make_request(f"r{number}", f"a{{{number + 1}}}")):
            until_ready(compiler, 1)
        assert compiler.num_cached <= 3
    assert compiler.start(make_request("newest", "a{10}"))
