"""Supported versions of kind, kubectl and helm."""

from __future__ import annotations

import pytest
from offline.tools import HELM, KIND, Tool, is_supported, parse_version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("kind v0.27.0 go1.24.4 linux/amd64", (0, 27, 0)),
        ("v4.3.0+g1a2b3c4", (4, 3, 0)),
        ("Client Version: v1.32.0\nKustomize Version: v5.5.0", (1, 32, 0)),
        ("no version here", None),
    ],
)
def test_parse_version_reads_tool_output(text: str, version: tuple[int, ...] | None) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("tool", "output", "supported"),
    [
        (KIND, "kind v0.20.0 go1.20", True),
        (KIND, "kind v0.9.0 go1.15", False),  # newer only in text order
        (HELM, "v2.17.0+ga690bad", False),
        (HELM, "v3.0.0+ge29ce2a", True),
        (HELM, "no version", False),
    ],
)
def test_is_supported_from_oldest_version(
    tool: Tool, output: str, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offline.tools.output_of", lambda *_, **__: output)
    assert is_supported(tool, "/usr/bin/tool") is supported


def test_is_supported_is_false_without_executable() -> None:
    assert not is_supported(KIND, None)
    assert not is_supported(KIND, "/nonexistent/kind")
