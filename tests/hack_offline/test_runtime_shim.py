"""The runtime shim: only where it is needed, and only what it must change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from offline.runtime_shim import fit, is_needed, option, rewrite


def a_process() -> dict[str, Any]:
    names = ["CAP_SYS_ADMIN", "CAP_SYS_RESOURCE"]
    return {"capabilities": {"bounding": [*names], "effective": [*names]}, "oomScoreAdj": -500, "args": ["sh"]}


@pytest.mark.parametrize(
    ("bounding", "needed"),
    [
        ("000001ffffffffff", False),
        ("000001fffeffffff", True),  # bit 24 is missing
    ],
)
def test_it_is_needed_where_the_capability_is_out_of_bounds(bounding: str, needed: bool) -> None:
    assert is_needed(f"Name:\tpython3\nCapEff:\t0\nCapBnd:\t{bounding}\n") is needed


def test_a_process_loses_the_capability_and_its_lowered_oom_score() -> None:
    process = a_process()
    fit(process)
    assert process["capabilities"] == {"bounding": ["CAP_SYS_ADMIN"], "effective": ["CAP_SYS_ADMIN"]}
    assert process["oomScoreAdj"] == 0
    assert process["args"] == ["sh"]


def test_a_raised_oom_score_stays() -> None:
    process = {"oomScoreAdj": 900}
    fit(process)
    assert process == {"oomScoreAdj": 900}


@pytest.mark.parametrize("arguments", [["create", "--bundle", "/b", "id"], ["create", "--bundle=/b", "id"]])
def test_an_option_is_found_in_both_spellings(arguments: list[str]) -> None:
    assert option(arguments, "--bundle") == "/b"
    assert option(arguments, "--process") is None


def test_the_bundle_and_the_process_file_are_rewritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"process": a_process(), "root": {"path": "rootfs"}}))
    (tmp_path / "process.json").write_text(json.dumps(a_process()))
    rewrite(["create", "--bundle", str(tmp_path), "id"])
    rewrite(["exec", "--process", str(tmp_path / "process.json"), "id"])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["root"] == {"path": "rootfs"}
    for process in (config["process"], json.loads((tmp_path / "process.json").read_text())):
        assert process["capabilities"]["bounding"] == ["CAP_SYS_ADMIN"]
        assert process["oomScoreAdj"] == 0
