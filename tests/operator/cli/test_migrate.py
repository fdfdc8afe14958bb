"""`trimtab migrate`: converted fields, dropped parts with a reason, and a valid result."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from trimtab_operator.cli.migrate_command import from_command, from_resource
from trimtab_operator.cli.trimtab_command import app
from trimtab_operator.planning.admission import validation_messages
from typer.testing import CliRunner

COMMAND = """vllm serve Qwen/Qwen3-8B --tensor-parallel-size 2 --max_model_len 16k --gpu-memory-utilization 0.92
--attention-backend FLASHINFER --served-model-name a b --port 8080 --kv-transfer-config {} --swap-space 4
--no-enable-prefix-caching --enable-auto-tool-choice --tool-call-parser hermes"""
GPUS = {"limits": {"nvidia.com/gpu": "2", "memory": "64Gi"}}
TOKEN = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}
INFERENCE_SERVICE: dict[str, Any] = {
    "apiVersion": "serving.kserve.io/v1beta1",
    "kind": "InferenceService",
    "metadata": {"name": "llama", "namespace": "prod"},
    "spec": {
        "predictor": {
            "minReplicas": 1,
            "maxReplicas": 4,
            "scaleTarget": 10,
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "model": {
                "modelFormat": {"name": "huggingface"},
                "storageUri": "hf://meta-llama/Llama-3.1-8B",
                "args": ["--model_name=llama", "--backend=vllm", "--max_model_len=8192"],
                "env": [TOKEN, {"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}],
                "resources": GPUS,
            },
        }
    },
}
DEPLOYMENT: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "qwen"},
    "spec": {
        "replicas": 3,
        "template": {
            "spec": {
                "containers": [
                    {
                        "name": "vllm",
                        "image": "vllm/vllm-openai:v1",
                        "command": ["/bin/sh", "-c", "vllm serve Qwen/Qwen3-8B --seed 1"],
                        "resources": GPUS,
                    },
                    {"name": "proxy"},
                ]
            }
        },
    },
}
LLM_INFERENCE_SERVICE: dict[str, Any] = {
    "apiVersion": "serving.kserve.io/v1alpha1",
    "kind": "LLMInferenceService",
    "metadata": {"name": "ds"},
    "spec": {
        "model": {"uri": "hf://deepseek-ai/DeepSeek-V2-Lite", "name": "ds"},
        "replicas": 2,
        "parallelism": {"data": 4, "dataLocal": 4, "expert": True},
        "router": {"route": {}},
        "prefill": {"replicas": 1},
        "template": {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "4"}}}]},
    },
}


def test_command_line_becomes_fields_and_arguments() -> None:
    made = from_command(shlex.split(COMMAND))
    assert made.resource()["metadata"] == {"name": "qwen3-8b"}
    assert made.spec == {
        "model": {"uri": "hf://Qwen/Qwen3-8B", "servedName": "a"},
        "parallelism": {"tensor": 2},
        "engine": {
            "maxModelLen": 16000,
            "gpuMemoryUtilization": "0.92",
            "swapSpace": "4096Mi",
            "enablePrefixCaching": False,
        },
        "runtime": {"args": ["--enable-auto-tool-choice", "--tool-call-parser=hermes"]},
    }
    assert [note.split(":")[0] for note in made.notes] == [
        "dropped --attention-backend=FLASHINFER",
        "dropped --served-model-name b",
        "dropped --port=8080",
        "dropped --kv-transfer-config={}",
    ]


def test_inference_service_keeps_scaling_token_and_tolerations() -> None:
    made = from_resource(INFERENCE_SERVICE)
    assert made.namespace == "prod"
    assert made.spec["model"] == {
        "uri": "hf://meta-llama/Llama-3.1-8B",
        "servedName": "llama",
        "tokenSecretRef": {"name": "hf", "key": "token"},
    }
    assert made.spec["scaling"] == {"minReplicas": 1, "maxReplicas": 4}
    assert made.spec["parallelism"] == {"tensor": 2}
    assert made.spec["template"]["spec"]["containers"] == [
        {"name": "main", "resources": {"limits": {"memory": "64Gi"}}}
    ]


def test_deployment_with_a_shell_command_is_converted() -> None:
    made = from_resource(DEPLOYMENT)
    assert made.spec["model"] == {"uri": "hf://Qwen/Qwen3-8B"}
    assert made.spec["runtime"] == {"args": ["--seed=1"], "device": "cuda"}
    assert any(note.startswith("dropped container proxy") for note in made.notes)


def test_llm_inference_service_keeps_its_layout() -> None:
    made = from_resource(LLM_INFERENCE_SERVICE)
    assert made.spec["parallelism"] == {"data": 4, "expert": True}
    assert made.spec["router"] == {"enabled": True}
    assert any(note.startswith("dropped spec.prefill") for note in made.notes)


@pytest.mark.parametrize("body", [INFERENCE_SERVICE, DEPLOYMENT, LLM_INFERENCE_SERVICE])
def test_converted_resource_is_valid(body: dict[str, Any]) -> None:
    assert validation_messages(from_resource(body).resource(), default_image="engine:1") == []


def test_command_prints_resource_and_notes(tmp_path: Path) -> None:
    file = tmp_path / "isvc.yaml"
    file.write_text(yaml.safe_dump_all([INFERENCE_SERVICE, DEPLOYMENT]))
    done = CliRunner().invoke(app, ["migrate", "-f", str(file)])
    assert done.exit_code == 0, done.output
    assert [body["kind"] for body in yaml.safe_load_all(done.stdout)] == ["InferenceDeployment"] * 2
    assert "llama: dropped spec.predictor.scaleTarget: scaling follows latency" in done.stderr


def test_other_kind_is_rejected_by_name(tmp_path: Path) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text("apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n")
    done = CliRunner().invoke(app, ["migrate", "-f", str(file)])
    assert done.exit_code == 2
    assert "kind Pod of v1 cannot be converted" in done.stderr


def test_result_that_would_be_rejected_exits_with_2() -> None:
    done = CliRunner().invoke(app, ["migrate", "vllm serve --seed 1"])
    assert done.exit_code == 2
    assert "spec.model" in done.stderr
