"""Checks of spec.runtime.args, and their agreement with the engine's own parser."""

from typing import Any

import pytest
from trimtab_engine import cli as engine_cli
from trimtab_operator.planning.admission import validation_messages, warnings_of
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.validation.engine_flags import engine_flags, flag_errors

REJECTED = [
    (["--enable-auto-tool-choise"], "did you mean --enable-auto-tool-choice?"),
    (["--middleware=a.b"], "not supported by the engine"),
    (["--seed"], "needs a value"),
    (["--seed", "--enable-log-requests"], "needs a value"),
    (["--seed=x"], "not an integer"),
    (["--enable-log-requests=true"], "takes no value"),
    (["--enable-log-requests", "true"], "does not belong to a flag"),
    (["--scheduling-policy=deadlin"], "did you mean deadline?"),
    (["--model_name=x"], "is not a flag of the engine"),
    (["--backend=vllm", "--seed=1"], "is not a flag of the engine"),
]
ACCEPTED = [
    ["--seed=1", "--cpu-threads", "2"],
    ["--seed", "1"],
    ["--enable-lora", "--lora-modules", "sql=/a", "law=/b"],
    ["--api-key=$(API_KEY)"],
    ["--scheduling-policy=deadline"],
    ["--enable-log-requests"],
]


def body(args: list[str], *, image: str | None = None) -> dict[str, Any]:
    runtime: dict[str, Any] = {"device": "cpu", "args": args} | ({"image": image} if image else {})
    return {
        "apiVersion": "trimtab.dev/v1alpha1",
        "kind": "InferenceDeployment",
        "metadata": {"name": "m", "namespace": "default", "uid": "u", "generation": 1},
        "spec": {"model": {"uri": "file:///models/m"}, "runtime": runtime},
    }


def is_accepted_by_engine(args: list[str]) -> bool:
    try:
        engine_cli._parser().parse_args(["serve", "/models/m", *args])
    except SystemExit:
        return False
    return True


@pytest.mark.parametrize(("args", "words"), REJECTED)
def test_flag_the_engine_rejects_is_an_error_with_advice(args: list[str], words: str) -> None:
    messages = validation_messages(body(args), default_image="engine:1")
    assert any(line.startswith("spec.runtime.args[") and words in line for line in messages), messages
    assert not is_accepted_by_engine(args)


@pytest.mark.parametrize("args", ACCEPTED)
def test_flag_the_engine_accepts_is_no_error(args: list[str]) -> None:
    assert validation_messages(body(args), default_image="engine:1") == []
    assert is_accepted_by_engine([arg.replace("$(API_KEY)", "k") for arg in args])


@pytest.mark.parametrize("args", [["-t", "2"], ["-e"], ["-qfp8"], ["--$(F)=x"], ["--max_num_seqs=4"], ["-tp=2"]])
def test_owned_flag_in_another_spelling_is_rejected(args: list[str]) -> None:
    assert validation_messages(body(args, image="own:1"), default_image=None) != []


def test_device_memory_above_the_memory_limit_is_rejected() -> None:
    resource: dict[str, Any] = body(["--device-memory-bytes=8Gi"])
    container = {"name": "main", "resources": {"limits": {"memory": "4Gi"}}}
    resource["spec"]["template"] = {"spec": {"containers": [container]}}
    messages = validation_messages(resource, default_image="engine:1")
    assert any("above the container's memory limit 4Gi" in line for line in messages), messages
    container["resources"] = {"limits": {"memory": "9Gi"}}
    assert validation_messages(resource, default_image="engine:1") == []


def test_unknown_flag_with_an_own_image_is_a_warning() -> None:
    resource = body(["--from-the-future=1"], image="own:2")
    assert validation_messages(resource, default_image=None) == []
    warnings = warnings_of(InferenceDeployment.parse(resource, default_image=None))
    assert any("--from-the-future is not a flag of the engine" in warning for warning in warnings)


def test_flag_without_effect_is_a_warning() -> None:
    resource = body(["--trust-remote-code", "--attention-backend", "FLASHINFER"])
    assert validation_messages(resource, default_image="engine:1") == []
    warnings = warnings_of(InferenceDeployment.parse(resource, default_image="engine:1"))
    assert [warning.partition(":")[0] for warning in warnings] == ["spec.runtime.args[0]", "spec.runtime.args[1]"]


def test_every_flag_of_the_engine_is_known_in_each_spelling() -> None:
    names = {
        name
        for action in engine_cli._parser().command("serve")._actions
        for name in action.option_strings
        if action.dest != "help"
    }
    assert set(engine_flags()) == names
    assert list(flag_errors([])) == []
