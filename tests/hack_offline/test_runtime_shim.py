"""The runtime shim: when it is needed, and the changes it makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from offline.runtime_shim import fit, is_needed, option, rewrite


def make_process() -> dict[str, Any]:
    names = ["CAP_SYS_ADMIN", "CAP_SYS_RESOURCE"]
    return {"capabilities": {"bounding": [*names], "effective": [*names]}, "oomScoreAdj": -500, "args": ["sh"]}


@pytest.mark.parametrize(
    ("bounding", "needed"),
    [
        ("000001ffffffffff", False),
        ("000001fffeffffff", True),  # bit 24 is missing
    ],
)
def test_is_needed_without_the_capability(bounding: str, needed: bool) -> None:
    assert is_needed(f"Name:\tpython3\nCapEff:\t0\nCapBnd:\t{bounding}\n") is needed


def test_fit_removes_capability_and_negative_oom_score() -> None:
    process = make_process()
    fit(process)
    assert process["capabilities"] == {"bounding": ["CAP_SYS_ADMIN"], "effective": ["CAP_SYS_ADMIN"]}
    assert process["oomScoreAdj"] == 0
    assert process["args"] == ["sh"]


def test_fit_keeps_positive_oom_score() -> None:
    process = {"oomScoreAdj": 900}
    fit(process)
    assert process == {"oomScoreAdj": 900}


@pytest.mark.parametrize("arguments", [["create", "--bundle", "/b", "id"], ["create", "--bundle=/b", "id"]])
def test_option_accepts_both_spellings(arguments: list[str]) -> None:
    assert option(arguments, "--bundle") == "/b"
    assert option(arguments, "--process") is None


def test_rewrite_edits_bundle_and_process_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"process": make_process(), "root": {"path": "rootfs"}}))
    (tmp_path / "process.json").write_text(json.dumps(make_process()))
    rewrite(["create", "--bundle", str(tmp_path), "id"])
    rewrite(["exec", "--process", str(tmp_path / "process.json"), "id"])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["root"] == {"path": "rootfs"}
    for process in (config["process"], json.loads((tmp_path / "process.json").read_text())):
        assert process["capabilities"]["bounding"] == ["CAP_SYS_ADMIN"]
        assert process["oomScoreAdj"] == 0
