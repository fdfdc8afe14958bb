"""`trimtab install`, `catalogue` and `run`: the catalogue's facts, manifests and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from trimtab_operator.cli.catalogue import default_model_len, load_catalogue, smallest_layout
from trimtab_operator.cli.run_command import complete_model
from trimtab_operator.cli.trimtab_command import app
from trimtab_operator.layout.gpus import gpu_named
from trimtab_operator.planning.admission import validation_messages, warnings_of
from trimtab_operator.resource.spec import InferenceDeployment
from typer.testing import CliRunner, Result

MODELS = load_catalogue()
MAX_ERROR = 0.001  # of the computed number of parameters; published numbers are rounded
FP8_BLOCK_SCALES = 0.004  # of DeepSeek's bytes: one float32 per 128 x 128 weights, and bf16 embeddings


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("name", MODELS)
def test_weights_follow_from_the_published_parameters(name: str) -> None:
    model = MODELS[name]
    is_fp8 = "quantization_config" in model.config
    expected = model.parameters * (1 if is_fp8 else 2)
    assert model.facts.weights_bytes == pytest.approx(expected, rel=FP8_BLOCK_SCALES if is_fp8 else MAX_ERROR)


@pytest.mark.parametrize("name", MODELS)
def test_manifest_of_model_is_valid_and_renders(name: str, tmp_path: Path) -> None:
    done = run("run", name, "--gpu", "H200", "--dry-run")
    assert done.exit_code == 0, done.output
    body = yaml.safe_load(done.stdout)
    assert validation_messages(body, default_image="engine:1") == []
    assert warnings_of(InferenceDeployment.parse(body, default_image="engine:1")) == []
    file = tmp_path / "m.yaml"
    file.write_text(done.stdout)
    rendered = run("render", "-f", str(file), "--default-image", "engine:1")
    assert rendered.exit_code == 0, rendered.output


def test_catalogue_has_at_least_thirty_models() -> None:
    assert len(MODELS) >= 30
    assert complete_model("qwen3-0") == ["qwen3-0.6b"]


@pytest.mark.parametrize(
    ("name", "gpu", "gpus"),
    [
        ("llama-3.1-8b", "H100", 1),
        ("llama-3.1-70b", "H100", 4),
        ("deepseek-v3", "H200", 8),
        ("llama-3.1-70b", "H200", 2),
        ("qwen3-8b", "L4", 2),
    ],
)
def test_smallest_layout_has_fewest_gpus(name: str, gpu: str, gpus: int) -> None:
    facts = MODELS[name].facts
    layout = smallest_layout(facts, gpu_named(gpu), max_model_len=default_model_len(facts))
    assert layout is not None
    assert layout.gpus == gpus


def test_catalogue_lists_memory_and_gpus() -> None:
    rows = {row["name"]: row for row in json.loads(run("catalogue", "-o", "json").stdout)}
    assert rows["llama-3.1-8b"]["weights_bytes"] == MODELS["llama-3.1-8b"].facts.weights_bytes
    assert "llama-3.1-405b" in run("catalogue").stdout


def test_run_of_a_hub_model_needs_no_catalogue() -> None:
    body = yaml.safe_load(run("run", "hf://org/Some.Model", "--gpu", "cpu", "--dry-run").stdout)
    assert (body["metadata"]["name"], body["spec"]["runtime"]) == ("some-model", {"device": "cpu"})
    assert body["spec"]["model"] == {"uri": "hf://org/Some.Model"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt-9", "--dry-run"), "MODEL: gpt-9 is not in the catalogue; list it with `trimtab catalogue`"),
        (("qwen3-8b", "--dry-run"), "--gpu: is needed with --dry-run"),
        (("deepseek-v3", "--gpu", "L4", "--dry-run"), "does not fit on four nodes of L4; use a larger GPU"),
    ],
)
def test_run_rejects_input_with_a_remedy(arguments: tuple[str, ...], message: str) -> None:
    done = run("run", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


def test_install_prints_the_helm_command() -> None:
    done = run("install", "--dry-run", "--set", "replicas=1", "-n", "ops")
    assert done.stdout.strip() == (
        "helm upgrade --install trimtab charts/trimtab --namespace ops --create-namespace --wait --set replicas=1"
    )
    missing = run("install", "--chart", "no/such/chart")
    assert missing.exit_code == 2
