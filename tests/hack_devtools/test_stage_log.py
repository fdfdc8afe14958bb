"""One clock over the programs of one make, and the last line that says what each stage took."""

from __future__ import annotations

from pathlib import Path

import pytest
from devtools import stage_log
from devtools.errors import UsageError
from devtools.progress import stage
from devtools.stage_log import Ended, spent, took


def a_stage(name: str, at: float, seconds: float) -> Ended:
    return Ended(name, at, seconds, expected_seconds=seconds)


def test_stages_of_a_group_that_run_at_once_count_once() -> None:
    assert spent([a_stage("images: a", 10.0, 30.0), a_stage("images: b", 20.0, 30.0)]) == [("images", 40.0)]


def test_stages_of_a_group_that_follow_add_up() -> None:
    assert spent([a_stage("kubernetes: code", 0.0, 5.0), a_stage("kubernetes: build", 100.0, 7.0)]) == [
        ("kubernetes", 12.0)
    ]


def test_a_stage_inside_a_longer_one_of_its_group_adds_nothing() -> None:
    assert spent([a_stage("a: 1", 0.0, 50.0), a_stage("a: 2", 10.0, 5.0), a_stage("a: 3", 40.0, 20.0)]) == [("a", 60.0)]


def test_the_last_line_has_groups_in_order_of_their_begin_and_all_of_it() -> None:
    stages = [a_stage("story: answer", 90.0, 60.0), a_stage("docker: start", 1.0, 20.0), a_stage("tools", 2.0, 0.4)]
    assert took(stages, 151.0) == "2m31s in all: docker 20 s, story 1m00s"
    assert took([], 3.0) == "3 s in all"


def test_programs_of_one_make_share_its_begin_and_its_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    monkeypatch.setenv("TRIMTAB_BEGAN", "1700000000")
    with stage("docker: starting", 20.0):
        pass
    with pytest.raises(RuntimeError), stage("tools: kind", 5.0):
        raise RuntimeError
    assert stage_log.began() == 1700000000.0
    assert [each.name for each in stage_log.ended()] == ["docker: starting", "tools: kind"]
    monkeypatch.setenv("TRIMTAB_BEGAN", "1700000001")
    assert stage_log.ended() == [], "another make has stages of its own"


def test_a_begin_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_BEGAN", "noon")
    with pytest.raises(UsageError, match="TRIMTAB_BEGAN is 'noon'"):
        stage_log.began()


def test_records_of_old_journeys_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    for second in range(stage_log.KEPT_RECORDS + 5):
        monkeypatch.setenv("TRIMTAB_BEGAN", str(1700000000 + second))
        stage_log.note(a_stage("a", 0.0, 1.0))
    stage_log.forget_old()
    left = sorted(path.stem for path in (tmp_path / "logs" / "stages").iterdir())
    assert len(left) == stage_log.KEPT_RECORDS
    assert left[0] == "1700000005"
