"""Stage durations across the programs of one make command, and the final line."""

from __future__ import annotations

from pathlib import Path

import pytest
from devtools import stage_log
from devtools.errors import UsageError
from devtools.progress import stage
from devtools.stage_log import FinishedStage, group_durations, summary


def make_stage(name: str, at: float, seconds: float) -> FinishedStage:
    return FinishedStage(name, at, seconds, expected_seconds=seconds)


def test_parallel_stages_of_a_group_count_once() -> None:
    assert group_durations([make_stage("images: a", 10.0, 30.0), make_stage("images: b", 20.0, 30.0)]) == [
        ("images", 40.0)
    ]


def test_sequential_stages_of_a_group_add_up() -> None:
    assert group_durations([make_stage("kubernetes: code", 0.0, 5.0), make_stage("kubernetes: build", 100.0, 7.0)]) == [
        ("kubernetes", 12.0)
    ]


def test_nested_stage_of_a_group_adds_nothing() -> None:
    assert group_durations(
        [make_stage("a: 1", 0.0, 50.0), make_stage("a: 2", 10.0, 5.0), make_stage("a: 3", 40.0, 20.0)]
    ) == [("a", 60.0)]


def test_summary_lists_groups_by_start_and_total() -> None:
    stages = [
        make_stage("scenario: answer", 90.0, 60.0),
        make_stage("docker: start", 1.0, 20.0),
        make_stage("tools", 2.0, 0.4),
    ]
    assert summary(stages, 151.0) == "2m31s in total: docker 20 s, scenario 1m00s"
    assert summary([], 3.0) == "3 s in total"


def test_programs_of_one_make_share_start_and_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    monkeypatch.setenv("TRIMTAB_BEGAN", "1700000000")
    with stage("docker: starting", 20.0):
        pass
    with pytest.raises(RuntimeError), stage("tools: kind", 5.0):
        raise RuntimeError
    assert stage_log.began() == 1700000000.0
    assert [each.name for each in stage_log.recorded()] == ["docker: starting", "tools: kind"]
    monkeypatch.setenv("TRIMTAB_BEGAN", "1700000001")
    assert stage_log.recorded() == [], "another make command has separate stages"


def test_non_numeric_start_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_BEGAN", "noon")
    with pytest.raises(UsageError, match="TRIMTAB_BEGAN: 'noon'"):
        stage_log.began()


def test_old_records_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    for second in range(stage_log.KEPT_RECORDS + 5):
        monkeypatch.setenv("TRIMTAB_BEGAN", str(1700000000 + second))
        stage_log.record(make_stage("a", 0.0, 1.0))
    stage_log.remove_old_records()
    left = sorted(path.stem for path in (tmp_path / "logs" / "stages").iterdir())
    assert len(left) == stage_log.KEPT_RECORDS
    assert left[0] == "1700000005"
