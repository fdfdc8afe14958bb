"""The plot of a run."""

from pathlib import Path

import pytest
from trimtab_engine.bench.serving import plot as plots
from trimtab_engine.bench.serving.client import RequestResult
from trimtab_engine.errors import ConfigError


@pytest.mark.parametrize("name", ["run.svg", "run.png"])
def test_plot_works_with_few_requests(tmp_path: Path, name: str) -> None:
    results = [RequestResult(ttft=0.1, itl=[0.01, 0.02], latency=0.13, success=True)]
    for number, complete in enumerate((results, [])):
        path = tmp_path / f"{number}-{name}"
        plots.plot(complete, path, title="a run", objectives={"ttft": 100.0})
        assert path.stat().st_size > 1000


def test_invalid_plot_name_is_rejected_before_measurement() -> None:
    with pytest.raises(ConfigError, match="must end in"):
        plots.check_plot(Path("run.txt"))


def test_missing_matplotlib_error_names_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        plots.check_plot(Path("run.svg"))


def test_only_result_folder_is_created_for_plot(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no such folder {tmp_path}/nope; create it"):
        plots.check_plot(tmp_path / "nope" / "run.svg")
    plots.check_plot(tmp_path / "results" / "run.svg", made_anyway=str(tmp_path / "results"))
    assert list(tmp_path.iterdir()) == []
