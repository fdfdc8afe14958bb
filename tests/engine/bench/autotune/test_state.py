"""State files: a search resumes only from results with the same settings."""

import json
import math
from pathlib import Path

import pytest
from trimtab_engine.bench.autotune.search import Purpose, Trial, TrialResult
from trimtab_engine.bench.autotune.space import Candidate, Setting
from trimtab_engine.bench.autotune.state import Run, open_state
from trimtab_engine.errors import ConfigError

START = {"gpu_memory_utilization": 0.7, "max_num_seqs": 8, "max_num_batched_tokens": 64}
OURS = START | {"max_num_seqs": 4}


def make_run(rate: float = math.inf, refused: str | None = None) -> Run:
    figures = {"request_throughput": 1 / 3, "p99_itl_ms": None}
    return Run(Trial(Purpose.LOAD, Setting(Candidate(4, 64), 0.95), rate), TrialResult(figures, refused), 1.5)


def test_state_round_trips_exactly(tmp_path: Path) -> None:
    state = open_state(tmp_path / "state.json", {"model": "m"}, START)
    runs = [make_run(), make_run(10 / 3), make_run(2.0, "no memory")]
    for run in runs:
        state.add(run)
    again = open_state(tmp_path / "state.json", {"model": "m"}, START)
    assert list(again.runs.values()) == runs
    assert again.start == START


def test_state_with_other_settings_is_rejected(tmp_path: Path) -> None:
    open_state(tmp_path / "state.json", {"num_prompts": 50, "model": "m"}, START).add(make_run())
    with pytest.raises(ConfigError, match=r"num_prompts was 50 and is 100 now.*--restart"):
        open_state(tmp_path / "state.json", {"num_prompts": 100, "model": "m"}, START)


def test_start_values_survive_a_crash(tmp_path: Path) -> None:
    state = open_state(tmp_path / "state.json", {}, START)
    state.set_last = OURS
    state.add(make_run())
    assert open_state(tmp_path / "state.json", {}, OURS).start == START


def test_values_changed_by_others_become_start_values(tmp_path: Path) -> None:
    state = open_state(tmp_path / "state.json", {}, START)
    state.set_last = OURS
    state.add(make_run())
    theirs = START | {"max_num_seqs": 16}
    assert open_state(tmp_path / "state.json", {}, theirs).start == theirs


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"format": 1, "settings": {}, "start": {}, "runs": 3})])
def test_unreadable_state_error_names_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ConfigError, match=r"state\.json.*use --restart to start over"):
        open_state(tmp_path / "state.json", {}, START)


def test_state_without_runs_accepts_other_settings(tmp_path: Path) -> None:
    open_state(tmp_path / "state.json", {"num_prompts": 50}, START).write()
    state = open_state(tmp_path / "state.json", {"num_prompts": 100}, OURS)
    assert (state.settings, state.start, state.runs) == ({"num_prompts": 100}, OURS, {})
