"""Commands that accept a hub model: inspect, serve's flags, and LLM."""

import argparse
import json
from pathlib import Path

import pytest
from harness.hub_server import HubServer
from huggingface_hub import constants
from trimtab_engine import LLM, SamplingParams
from trimtab_engine.cli import main
from trimtab_engine.errors import ConfigError
from trimtab_engine.flags.local_model import is_remote_model, local_model
from trimtab_engine.flags.serve import add_serve_flags
from trimtab_engine.models.facts import model_facts
from trimtab_engine.sources.progress import Progress

MODEL = "hf://org/llama"


@pytest.fixture
def llama(hub: HubServer, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The hub with a model that the engine runs; it is the one that HF_ENDPOINT names, and the cache is empty."""
    folder = tmp_path / "hub" / "llama"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "model.safetensors").write_bytes(b"w" * 10_000)
    hub.repos["org/llama"] = folder
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return hub


def serve_arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_serve_flags(parser)
    return parser.parse_args([MODEL, "--device", "cpu", *flags])


def test_inspect_tells_a_model_of_the_hub_without_its_weights(
    llama: HubServer, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "said"
    assert main(["inspect", MODEL, "-o", "json", "--output-file", str(target)]) == 0
    commit = llama.commit("org/llama")
    facts = model_facts(str(tiny_model), load_format="dummy")
    named = {"model": f"{MODEL}@{commit}", "revision": commit, "format": "safetensors"}
    assert json.loads(capsys.readouterr().out) == {**facts, **named} == json.loads(target.read_text())
    assert llama.asked_for("model.safetensors") == []
    assert not (tmp_path / "cache").exists()


def test_inspect_says_why_a_model_cannot_be_had(llama: HubServer, tmp_path: Path) -> None:
    target = tmp_path / "said"
    assert main(["inspect", "hf://org/lama", "--output-file", str(target)]) == 2
    assert "no such model" in target.read_text()


def test_offline_inspect_says_so_and_where_the_cached_folder_is(
    llama: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("trimtab_engine.sources.source.PAUSES_SECONDS", ())
    assert main(["inspect", MODEL]) == 2
    said = capsys.readouterr().err
    assert "the hub is not used, as HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set; unset it" in said
    assert f"the folder that trimtab-engine fetch {MODEL} prints" in said


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("gs://bucket/llama", "models of gs:// are not supported; copy it to this machine and give its folder"),
        ("s3://", "names no model of s3://; write s3://BUCKET/PREFIX"),
        ("https://huggingface.co/org/llama/tree/main", "is a page of the Hugging Face hub; write hf://org/llama"),
        ("https://example.com/llama.gguf", "models of https:// are not supported; copy it to this machine"),
        ("pvc://claim/llama", "give the folder at which the claim is mounted"),
        ("llama-that-is-nowhere", "written hf://ORG/NAME, such as hf://ORG/llama-that-is-nowhere"),
    ],
)
@pytest.mark.parametrize("command", ["fetch", "inspect", "serve"])
def test_non_hub_model_is_reported_by_kind(
    command: str, model: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, model]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_of_this_machine_is_nothing_to_fetch(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", str(tiny_model)]) == 2
    assert "is a local model; use trimtab-engine serve" in capsys.readouterr().err


def test_fetch_prints_the_folder(llama: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", MODEL]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert (folder / "model.safetensors").read_bytes() == b"w" * 10_000


def test_serve_gets_a_path_and_the_models_own_name(llama: HubServer) -> None:
    arguments = serve_arguments()
    assert is_remote_model(arguments)
    told: list[Progress] = []
    local, fetched = local_model(arguments, told.append)
    assert fetched is not None
    assert local.model == str(fetched.path)
    assert local.served_model_name == ["llama"]
    assert told
    assert not is_remote_model(local)
    assert fetched.downloaded is not None
    assert fetched.downloaded.num_bytes == told[-1].total_bytes > 0
    fetched.close()
    local, again = local_model(serve_arguments("--served-model-name", "chat"))
    assert local.served_model_name == ["chat"]
    assert again is not None
    assert again.downloaded is None, "it was in the cache"


def test_a_wrong_flag_is_told_before_anything_is_fetched(llama: HubServer) -> None:
    with pytest.raises(ConfigError, match="max-num-seqs"):
        local_model(serve_arguments("--max-num-seqs", "64", "--max-num-seqs-cap", "8"))
    assert llama.asked == []


def test_llm_takes_a_name_of_the_hub(llama: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with LLM(
        "org/llama",
        load_format="dummy",
        device="cpu",
        device_memory_bytes=4 << 30,
        cpu_threads=1,
        max_model_len=64,
        num_gpu_blocks_override=16,
        max_num_seqs=2,
        max_num_batched_tokens=64,
    ) as llm:
        (output,) = llm.generate("a", SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4
    assert llama.asked_for("model.safetensors") == []
