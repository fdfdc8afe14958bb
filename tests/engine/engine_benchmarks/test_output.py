"""Pages are written to any folder, including one that does not exist yet."""

from pathlib import Path
from typing import Any

import pytest
from engine_benchmarks import api_bench, mechanism_bench, same_start, speculation_bench

RATE: dict[str, Any] = {"per_second": 1.0, "cpu_microseconds": 1.0, "rounds": (1.0,)}
SERVERS = {"requests": RATE, "chunks": RATE}
FIGURES = {"detokenize_microseconds": {"median": 1.0, "best": 1.0}, "servers_1": SERVERS, "servers_2": SERVERS}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "not" / "there"


def test_api_server_page_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_bench, "measure", lambda model: FIGURES)
    assert api_bench.main(["MODEL", "--output", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == {"api-server.json", "api-server.md"}


def test_same_start_page_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_starts(model: str) -> list[same_start.Start]:
        return []

    monkeypatch.setattr(same_start, "measure", no_starts)
    monkeypatch.setattr(same_start, "page", lambda *_, **__: "the page")
    monkeypatch.setattr(same_start, "end_on_sigterm", lambda: None)
    assert same_start.main(["MODEL", "--output", str(folder)]) == 0
    assert (folder / same_start.PAGE).read_text() == "the page"


def test_speculation_page_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation_bench, "measure_all", lambda model, rounds: [])
    speculation_bench.main(Path("MODEL"), folder / "page.md", rounds=1)
    assert (folder / "page.md").read_text().startswith("# ")


def test_mechanism_rounds_are_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_rounds(model: str, rounds: int) -> dict[str, Any]:
        return {"rounds": rounds}

    monkeypatch.setitem(mechanism_bench.MECHANISMS, "resize", no_rounds)
    monkeypatch.setattr(mechanism_bench, "end_on_sigterm", lambda: None)
    assert mechanism_bench.main(["MODEL", "resize", "--rounds", "1", "--output", str(folder)]) == 0
    assert (folder / "resize.json").exists()
