"""Differential test: the same requests to a running `vllm serve` and a running `trimtab serve`.

Skipped unless DIFFERENTIAL_VLLM_URL and DIFFERENTIAL_TRIMTAB_URL are set. To start both servers, see
docs/results/differential-vllm.md.
"""

from __future__ import annotations

import os

import httpx
import pytest
from differential.comparison import Answer, ask, differences
from differential.explained_differences import EXPLAINED
from differential.requests_to_compare import REQUESTS, ComparedRequest

VLLM_URL, TRIMTAB_URL = os.environ.get("DIFFERENTIAL_VLLM_URL"), os.environ.get("DIFFERENTIAL_TRIMTAB_URL")
needs_servers = pytest.mark.skipif(not (VLLM_URL and TRIMTAB_URL), reason="needs the URLs of two running servers")


@needs_servers
@pytest.mark.parametrize("request_", REQUESTS, ids=lambda one: one.name)
async def test_request_same_to_both_differs_as_explained(request_: ComparedRequest) -> None:
    assert VLLM_URL
    assert TRIMTAB_URL
    async with httpx.AsyncClient() as http:
        found = differences(await ask(http, VLLM_URL, request_), await ask(http, TRIMTAB_URL, request_))
    if request_.name in EXPLAINED:
        assert found, f"no difference is left; remove {request_.name} from the explained differences"
    else:
        assert not found


def test_explained_differences_names_match_requests() -> None:
    names = [one.name for one in REQUESTS]
    assert len(names) == len(set(names))
    assert set(names) >= EXPLAINED.keys()


@pytest.mark.parametrize(
    ("vllm", "trimtab", "expected"),
    [
        ({"text": "a"}, {"text": "b"}, ['text: vLLM "a", Trimtab "b"']),
        ({"text": "a"}, {"text": "a", "id": "x"}, ['id: only Trimtab ("x")']),
        ({"id": "a", "created": 1}, {"id": "b", "created": 2}, []),
        ({"logprob": -1.0}, {"logprob": -1.001}, []),
        ({"logprob": -1.0}, {"logprob": -1.01}, ["logprob: vLLM -1.0, Trimtab -1.01"]),
        ([1], [1, 2], [": vLLM [1], Trimtab [1, 2]"]),
    ],
)
def test_differences_of_bodies_report_each(vllm: object, trimtab: object, expected: list[str]) -> None:
    assert differences(_ok(vllm), _ok(trimtab)) == expected


def test_differences_of_errors_compare_status_only() -> None:
    one, other = Answer(400, "application/json", {"message": "a"}), Answer(400, "application/json", {"detail": 1})
    assert differences(one, other) == []
    assert differences(one, Answer(422, "application/json", {})) == ["status: vLLM 400, Trimtab 422"]


def _ok(body: object) -> Answer:
    return Answer(200, "application/json", body)
