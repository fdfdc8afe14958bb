"""Which kind, kubectl and helm are good enough."""

from __future__ import annotations

import pytest
from cluster.tools import HELM, KIND, Tool, is_supported, parse_version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("kind v0.27.0 go1.24.4 linux/amd64", (0, 27, 0)),
        ("v4.3.0+g1a2b3c4", (4, 3, 0)),
        ("Client Version: v1.32.0\nKustomize Version: v5.5.0", (1, 32, 0)),
        ("no version here", None),
    ],
)
def test_a_version_is_read_from_the_tool_s_own_words(text: str, version: tuple[int, ...] | None) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("tool", "says", "good"),
    [
        (KIND, "kind v0.20.0 go1.20", True),
        (KIND, "kind v0.9.0 go1.15", False),  # as text it would be the newer one
        (HELM, "v2.17.0+ga690bad", False),
        (HELM, "v3.0.0+ge29ce2a", True),
        (HELM, "no version", False),
    ],
)
def test_a_tool_is_good_from_its_oldest_version_on(
    tool: Tool, says: str, good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.tools.output_of", lambda *_, **__: says)
    assert is_supported(tool, "/usr/bin/tool") is good


def test_a_tool_that_is_absent_is_not_good() -> None:
    assert not is_supported(KIND, None)
    assert not is_supported(KIND, "/nonexistent/kind")
