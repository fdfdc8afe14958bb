"""Profiler: rejection, trace files, and the automatic end."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from trimtab_engine.device import profiler
from trimtab_engine.device.profiler import Profiler
from trimtab_engine.errors import ConfigError


def test_profiler_without_folder_is_rejected_with_flag() -> None:
    recorder = Profiler(None)
    status, body = recorder.answer(recorder.start)
    assert status == 400
    assert "--profiler-dir" in body["message"]
    assert recorder.answer(recorder.stop)[0] == 400


def test_recording_writes_chrome_trace(tmp_path: Path) -> None:
    recorder = Profiler(str(tmp_path / "new" / "folder"))
    assert recorder.answer(recorder.start)[0] == 200
    torch.ones(4, 4) @ torch.ones(4, 4)
    recorder.on_step()
    status, body = recorder.answer(recorder.stop)
    assert (status, body["num_steps"]) == (200, 1)
    events = json.loads(gzip.decompress(Path(body["trace"]).read_bytes()))["traceEvents"]
    assert "aten::matmul" in {event["name"] for event in events}


def test_second_recording_is_rejected(tmp_path: Path) -> None:
    recorder = Profiler(str(tmp_path))
    with pytest.raises(ConfigError, match="start one first"):
        recorder.stop()
    recorder.start()
    with pytest.raises(ConfigError, match="stop it first"):
        recorder.start()
    recorder.stop()
    with pytest.raises(ConfigError, match="start one first"):
        recorder.stop()


def test_recording_ends_automatically_and_keeps_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "MAX_STEPS", 2)
    recorder = Profiler(str(tmp_path))
    recorder.start()
    for _ in range(5):
        recorder.on_step()
    assert recorder.stop()["num_steps"] == 2


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to --profiler-dir"):
        Profiler(str(tmp_path / "file")).start()
