"""Adapters from the client's view: listed as models, requested by name, loaded and unloaded at run time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
from adapter_folders import EVERY, an_adapter, modules_of
from trimtab_engine.models.checkpoint import expected_shapes
from trimtab_engine.models.registry import parse_model_config

if TYPE_CHECKING:
    from tests.engine.api.conftest import RealEngine

pytestmark = pytest.mark.usefixtures("forked")

PROMPT = "the quick brown fox"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """Return the folder of an adapter of the model, by number."""
    config = parse_model_config(json.loads((tiny_model / "config.json").read_text()), {}, "config.json")
    modules, folder = modules_of(expected_shapes(config), EVERY), tmp_path_factory.mktemp("adapters")
    return lambda number: an_adapter(folder / str(len([*folder.iterdir()])), modules, seed=number, size=0.5)


def text_of(engine: RealEngine, model: str) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = engine.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    text: str = answer.json()["choices"][0]["text"]
    return text


def vector_of(engine: RealEngine, model: str) -> list[float]:
    answer = engine.http.post("/v1/embeddings", json={"model": model, "input": PROMPT})
    assert answer.status_code == 200, answer.text
    vector: list[float] = answer.json()["data"][0]["embedding"]
    return vector


def names_of(engine: RealEngine) -> list[str]:
    return [model["id"] for model in engine.http.get("/v1/models").json()["data"]]


def test_adapters_are_models_requested_by_name(serve: Callable[..., RealEngine], adapter: Callable[[int], str]) -> None:
    first, second = adapter(1), adapter(2)
    as_json = json.dumps({"name": "law", "path": f"file://{second}", "base_model_name": "tiny"})
    engine = serve("--enable-lora", "--lora-modules", f"sql={first}", as_json, "--max-loras", "2")
    listed = engine.http.get("/v1/models").json()["data"]
    assert [(model["id"], model["root"], model["parent"]) for model in listed] == [
        ("tiny", "tiny", None),
        ("sql", first, "tiny"),
        ("law", second, "tiny"),
    ]
    assert engine.http.get("/v1/models/sql").json()["parent"] == "tiny"
    assert len({text_of(engine, name) for name in ("tiny", "sql", "law")}) == 3
    assert len({tuple(vector_of(engine, name)) for name in ("tiny", "sql", "law")}) == 3
    with openai.OpenAI(base_url=f"{engine.http.base_url}/v1", api_key="none", max_retries=0) as client:
        chunks = client.chat.completions.create(
            model="sql", messages=[{"role": "user", "content": PROMPT}], max_tokens=4, stream=True, temperature=0
        )
        assert {chunk.model for chunk in chunks} == {"sql"}
        with pytest.raises(openai.NotFoundError, match="the model 'art' does not exist; served models: tiny, sql, law"):
            client.completions.create(model="art", prompt=PROMPT)
    page = engine.http.get("/metrics").text
    assert 'vllm:lora_requests_info{engine="0",max_lora="2",model_name="tiny"' in page
    assert engine.http.post(LOAD, json={"lora_name": "x", "lora_path": first}).status_code == 404, "disabled"


def test_adapters_load_and_unload_on_all_servers_and_cores(
    serve: Callable[..., RealEngine], adapter: Callable[[int], str], tmp_path: Path
) -> None:
    first, second = adapter(1), adapter(2)
    flags = ("--enable-lora", "--allow-runtime-lora-updating", "--max-cpu-loras", "2", "--lora-modules", f"sql={first}")
    engine = serve(*flags, "--data-parallel-size", "2")
    post: Any = engine.http.post
    for body, status, message in (
        ({"lora_name": "law"}, 400, "lora_path"),
        ({"lora_name": "law", "lora_path": second, "more": 1}, 400, "more"),
        ({"lora_name": "", "lora_path": second}, 400, "lora_name"),
        ({"lora_name": "tiny", "lora_path": second}, 400, "tiny is the name of the base model"),
        ({"lora_name": "sql", "lora_path": second}, 400, "the adapter sql is loaded already"),
        ({"lora_name": "law", "lora_path": "hf://org/law"}, 400, "adapters are not downloaded"),
        ({"lora_name": "law", "lora_path": str(tmp_path / "no")}, 400, "is no folder here"),
        ({"lora_name": "law", "lora_path": "/a\0b"}, 400, "is no folder here"),
        ({"lora_name": "a\nb", "lora_path": second}, 400, "cannot be an adapter's name"),
        ({"lora_name": "\ud800", "lora_path": second}, 400, "lora_name"),
        ({"lora_name": 5, "lora_path": second}, 400, "lora_name"),
        ([], 400, ""),
        ({"lora_name": "law", "lora_path": second, "load_inplace": True}, 400, "load_inplace is not supported"),
    ):
        answer = post(LOAD, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert answer.status_code == status, answer.text
        assert message in answer.json()["error"]["message"]
    assert names_of(engine) == ["tiny", "sql"]

    answer = post(LOAD, json={"lora_name": "law", "lora_path": second})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'law' added successfully.")
    assert names_of(engine) == ["tiny", "sql", "law"]
    texts = {text_of(engine, "law") for _ in range(4)}
    assert len(texts) == 1, "same on every core"
    assert "all 2 places are taken" in post(LOAD, json={"lora_name": "art", "lora_path": first}).text

    answer = post(UNLOAD, json={"lora_name": "sql"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert post(UNLOAD, json={"lora_name": "sql"}).status_code == 404
    assert post("/v1/completions", json={"model": "sql", "prompt": PROMPT}).status_code == 404
    assert post(LOAD, json={"lora_name": "sql", "lora_path": second}).status_code == 200
    assert {text_of(engine, "sql")} == texts


def test_adapter_routes_are_disabled_by_default(server: Any) -> None:
    for path, body in ((LOAD, {"lora_name": "a", "lora_path": "/a"}), (UNLOAD, {"lora_name": "a"})):
        answer = server.http.post(path, json=body)
        assert answer.status_code == 404
        assert f"{path} is disabled; start the engine with --enable-lora" in answer.json()["error"]["message"]
