"""What is written for a model of the hub."""

from pathlib import Path

import pytest
from trimtab_engine.errors import ConfigError, ModelError
from trimtab_engine.hub.name import HubModel, hub_model

COMMIT = "a" * 40


@pytest.mark.parametrize(
    ("written", "model"),
    [
        ("hf://Qwen/Qwen3-8B", HubModel("Qwen/Qwen3-8B")),
        ("Qwen/Qwen3-8B", HubModel("Qwen/Qwen3-8B")),
        ("hf://Qwen/Qwen3-8B@v1.0", HubModel("Qwen/Qwen3-8B", "v1.0")),
        ("hf://Qwen/Qwen3-8B@refs/pr/4", HubModel("Qwen/Qwen3-8B", "refs/pr/4")),
        (f"hf://o/n@{COMMIT}/n-Q4_K_M.gguf", HubModel("o/n", COMMIT, "n-Q4_K_M.gguf")),
        ("hf://o/n/n.gguf", HubModel("o/n", None, "n.gguf")),
    ],
)
def test_a_model_of_the_hub_has_a_repository_a_revision_and_perhaps_a_file(written: str, model: HubModel) -> None:
    assert hub_model(written) == model
    assert hub_model(str(model)) == model


@pytest.mark.parametrize("path", ["/models/llm", "model.gguf", "./a/b", "file:///a/b", "a/b/c"])
def test_a_path_is_no_model_of_the_hub(path: str) -> None:
    assert hub_model(path) is None


def test_a_folder_that_is_here_comes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_model("org/name") is None
    assert hub_model("hf://org/name") == HubModel("org/name")


@pytest.mark.parametrize("written", ["hf://", "hf://name", "hf://a/b/c", "hf://a/b@", "hf://a/../b", "hf://-a/b"])
def test_what_names_no_model_is_refused(written: str) -> None:
    with pytest.raises(ModelError, match="write hf://ORG/NAME"):
        hub_model(written)


def test_a_revision_is_given_once_and_to_models_of_the_hub() -> None:
    assert hub_model("hf://a/b", "dev") == HubModel("a/b", "dev")
    assert hub_model("hf://a/b@dev", "dev") == HubModel("a/b", "dev")
    with pytest.raises(ConfigError, match="two revisions"):
        hub_model("hf://a/b@dev", "main")
    with pytest.raises(ConfigError, match="is a path"):
        hub_model("/models/b", "main")


def test_only_a_commit_is_pinned() -> None:
    assert HubModel("a/b", COMMIT).is_pinned
    assert not HubModel("a/b", "main").is_pinned
    assert not HubModel("a/b").is_pinned


@pytest.mark.parametrize(("written", "name"), [("hf://Qwen/Qwen3-8B@main", "Qwen3-8B"), ("hf://a/b/b-Q4.gguf", "b-Q4")])
def test_clients_call_it_by_its_last_part(written: str, name: str) -> None:
    model = hub_model(written)
    assert model is not None
    assert model.name == name
