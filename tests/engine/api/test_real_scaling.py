"""Engine cores that join and retire while requests are served: real processes with a tiny random model."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from tests.engine.api.conftest import RealEngine

Serve = Callable[..., "RealEngine"]
pytestmark = pytest.mark.usefixtures("forked")


class Load:
    """Continuous requests from several threads until stopped."""

    def __init__(self, engine: "RealEngine") -> None:
        self.answers: list[httpx.Response] = []
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(engine, str(number))) for number in range(6)]
        for thread in self._threads:
            thread.start()

    def _ask(self, engine: "RealEngine", prompt: str) -> None:
        while not self._ended.is_set():
            self.answers.append(engine.post(prompt, max_tokens=12))

    def end(self) -> list[int]:
        """Stop and return the statuses of all responses."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        return [answer.status_code for answer in self.answers]


def resize(engine: "RealEngine", **values: Any) -> httpx.Response:
    return engine.admin.patch("/admin/v1/config", json=values)


def applied(engine: "RealEngine") -> Any:
    return engine.admin.get("/admin/v1/config").json()["applied"]["data_parallel_size"]


def test_cores_join_and_retire_under_load_without_failures(serve: Serve) -> None:
    engine = serve("--data-parallel-size-cap", "2", "--api-server-count", "2")
    config = engine.admin.get("/admin/v1/config").json()
    assert config["fields"]["data_parallel_size"] == {"class": "drain", "min": 1, "max": 2}
    assert config["envelope"]["data_parallel_size_cap"] == 2
    refused = resize(engine, data_parallel_size=3)
    assert (refused.status_code, refused.json()["nearest"]) == (422, 2)
    dry = engine.admin.patch("/admin/v1/config?dry_run=1", json={"data_parallel_size": 2}).json()
    assert (dry["desired"]["data_parallel_size"], engine.layout()["scaling"]["desired"]) == (2, 1)

    load = Load(engine)
    assert resize(engine, data_parallel_size=2).json()["desired"]["data_parallel_size"] == 2
    (joining,) = engine.layout()["scaling"]["joining"]
    assert joining["data"] == 1
    assert resize(engine, max_num_seqs=3).status_code == 200  # during the load: the new core must not miss it
    engine.wait_for(lambda: applied(engine) == 2, "the second core")
    layout = engine.layout()
    assert [(row["rank"], row["data"]) for row in layout["ranks"]] == [(0, 0), (1, 1)]
    assert (layout["world_size"], layout["data_parallel_size"]) == (2, 2)
    engine.wait_for(lambda: engine.metric("vllm:generation_tokens_total").get("1", 0.0) > 24.0, "its first requests")
    assert engine.metric("trimtab_config_generation") == {"0": 3.0, "1": 3.0}
    generated = engine.metric("vllm:generation_tokens_total")["1"]

    assert resize(engine, data_parallel_size=1).status_code == 200
    engine.wait_for(lambda: applied(engine) == 1 and not engine.layout()["scaling"]["retiring"], "its exit")
    assert len(engine.layout()["ranks"]) == engine.layout()["data_parallel_size"] == 1
    assert engine.metric("trimtab_layout_ranks") == {"0": 1.0}
    assert engine.metric("vllm:generation_tokens_total")["1"] >= generated, "counters never decrease"

    assert resize(engine, data_parallel_size=2).status_code == 200
    engine.wait_for(lambda: applied(engine) == 2, "the second core again")
    assert set(load.end()) == {200}
    assert engine.post("a", rank="1").status_code == 200


def test_core_that_fails_to_join_changes_nothing(serve: Serve, tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    engine = serve("--data-parallel-size-cap", "2", model=model)
    (model / "config.json").unlink()
    assert resize(engine, data_parallel_size=2).status_code == 200
    engine.wait_for(lambda: "data_parallel_size falls back to 1" in engine.log.read_text(), "its failure")
    engine.wait_for(lambda: engine.layout()["scaling"]["desired"] == 1, "the old size")
    config = engine.admin.get("/admin/v1/config").json()
    assert config["desired"]["data_parallel_size"] == config["applied"]["data_parallel_size"] == 1
    assert engine.post("a").status_code == 200


def test_moe_core_count_change_requires_restart_with_reason(serve: Serve, tiny_moe: Path) -> None:
    engine = serve("--enable-expert-parallel", "--data-parallel-size-cap", "2", model=tiny_moe)
    refused = resize(engine, data_parallel_size=2)
    assert refused.status_code == 422
    body = refused.json()
    assert (body["field"], body["nearest"], body["min"], body["max"]) == ("data_parallel_size", 1, 1, 1)
    assert "with data_parallel_size 2 there would be 12 places, which needs 6 redundant experts" in body["message"]
