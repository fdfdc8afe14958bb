"""Limit of open files of the operator's process."""

from __future__ import annotations

import resource

import pytest
from trimtab_operator.cli.file_limits import MAX_OPEN_FILES, allow_open_files

NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "then"),
    [(1024, 4096, 4096), (1024, NO_LIMIT, MAX_OPEN_FILES), (4096, 4096, 4096), (1 << 20, NO_LIMIT, 1 << 20)],
)
def test_the_limit_is_raised_as_far_as_it_may_be(
    soft: int, hard: int, then: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {resource.RLIMIT_NOFILE: (soft, hard)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    assert allow_open_files() == then
    assert limits == {resource.RLIMIT_NOFILE: (then, hard)}
