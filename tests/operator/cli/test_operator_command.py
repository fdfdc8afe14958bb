"""`validate` and `render`: validation as in the API server, one line per error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trimtab_operator.cli.operator_command import app
from trimtab_operator.layout.facts import facts_of_config
from typer.testing import CliRunner

HEAD = "apiVersion: trimtab.dev/v1alpha1\nkind: InferenceDeployment\n"
SPEC = "model: {uri: 'file:///models/m'}, runtime: {device: cpu, image: 'engine:1'}"


def run(command: str, text: str, folder: Path) -> tuple[int, str]:
    file = folder / "resource.yaml"
    file.write_text(text, encoding="utf-8")
    result = CliRunner().invoke(app, [command, "-f", str(file)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind: [", "not YAML"),
        ("kind: ConfigMap", "contains no InferenceDeployment"),
        ("kind: InferenceDeploymnet", "; it contains InferenceDeploymnet"),
        (
            "spec:\n\tmodel: m",
            "line 2, column 1: found character '\\t' that cannot start any token: indent YAML with spaces",
        ),
        (f"{HEAD}metadata: {{}}\nspec: {{{SPEC}}}", "metadata.name is missing"),
        (f"{HEAD}metadata: {{name: m}}\nspec: {{{SPEC}, when: 2020-01-01}}", "spec.when: unknown field"),
        (f"{HEAD}metadata: {{name: m}}\nspec: &a {{{SPEC}, x: *a}}", "cannot be converted to JSON"),
        (f"{HEAD}metadata: {{name: m}}\nspec: {{{SPEC}, replicas: .nan}}", "spec.replicas"),
    ],
)
@pytest.mark.parametrize("command", ["validate", "render"])
def test_a_faulty_file_is_refused_in_words(command: str, text: str, words: str, tmp_path: Path) -> None:
    code, said = run(command, text, tmp_path)
    assert code == 2
    assert words in said


def test_validate_prints_warnings_of_accepted_resources(tmp_path: Path) -> None:
    text = f"{HEAD}metadata: {{name: m}}\nspec: {{{SPEC}, scaling: {{minReplicas: 2, maxReplicas: 3}}}}"
    code, said = run("validate", text, tmp_path)
    assert code == 0
    assert said.startswith("m: accepted\n  warning: spec.scaling: spec.tuning.mode Recommend only recommends")
    assert run("render", text, tmp_path)[1].count("kind: StatefulSet") == 2


@pytest.mark.parametrize("command", ["validate", "render"])
def test_the_file_stands_behind_the_flag_or_alone(command: str, tmp_path: Path) -> None:
    file = tmp_path / "resource.yaml"
    file.write_text(f"{HEAD}metadata: {{name: m}}\nspec: {{{SPEC}}}", encoding="utf-8")
    alone, flagged, both, neither = (
        CliRunner().invoke(app, [command, *arguments])
        for arguments in ([str(file)], ["--file", str(file)], [str(file), "-f", str(file)], [])
    )
    assert (alone.exit_code, alone.output) == (0, flagged.output)
    assert (both.exit_code, neither.exit_code) == (2, 2)
    assert "two files given" in both.output
    assert "FILE: not set" in neither.output


def test_a_good_file_is_accepted_and_rendered(tmp_path: Path) -> None:
    text = f"{HEAD}metadata: {{name: m, generation: x}}\nspec: {{{SPEC}}}"
    assert run("validate", text, tmp_path) == (0, "m: accepted\n")
    code, said = run("render", text, tmp_path)
    assert code == 0
    assert "kind: StatefulSet" in said


def test_render_prints_the_objects_of_a_router(tmp_path: Path) -> None:
    text = f"{HEAD}metadata: {{name: m}}\nspec: {{{SPEC}, router: {{}}}}"
    code, said = run("render", text, tmp_path)
    assert code == 0
    assert {"kind: Deployment", "kind: RoleBinding", "name: m-engines"} <= {line.strip() for line in said.splitlines()}


def test_resource_without_image_renders_placeholder(
    tmp_path: Path,
) -> None:
    text = f"{HEAD}metadata: {{name: m}}\nspec: {{model: {{uri: 'file:///models/m'}}, runtime: {{device: cpu}}}}"
    assert run("validate", text, tmp_path) == (0, "m: accepted\n")
    code, said = run("render", text, tmp_path)
    assert code == 0
    assert "m: spec.runtime.image: not set (rendered as the-operators-default-image)" in said
    assert "image: the-operators-default-image" in said


def test_validate_with_gpu_checks_memory(tmp_path: Path) -> None:
    file, facts = tmp_path / "resource.yaml", tmp_path / "facts.json"
    configs = json.loads((Path(__file__).parents[2] / "golden" / "published_configs.json").read_text())
    facts.write_text(json.dumps(facts_of_config(configs["Llama-3.1-70B"], "m").to_json()), encoding="utf-8")
    cuda = "model: {uri: file:///models/m}, parallelism: {tensor: 2}"
    file.write_text(f"{HEAD}metadata: {{name: m}}\nspec: {{{cuda}}}", encoding="utf-8")
    arguments = ["validate", "-f", str(file), "--facts", str(facts)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    result = CliRunner().invoke(app, [*arguments, "--gpu", "H100"])
    assert result.exit_code == 2
    assert "65.7 GiB of weights" in result.output
    assert CliRunner().invoke(app, [*arguments, "--gpu", "B200"]).exit_code == 0
    assert "use one of B200" in CliRunner().invoke(app, [*arguments, "--gpu", "H300"]).output
    assert "set --facts" in CliRunner().invoke(app, ["validate", "-f", str(file), "--gpu", "H100"]).output


def test_facts_of_the_model_judge_the_layout(tmp_path: Path) -> None:
    file, facts = tmp_path / "resource.yaml", Path(__file__).parents[2] / "golden" / "model_facts_smollm2.json"
    file.write_text(f"{HEAD}metadata: {{name: m}}\nspec: {{{SPEC}, parallelism: {{tensor: 2}}}}", encoding="utf-8")
    result = CliRunner().invoke(app, ["validate", "-f", str(file), "--facts", str(facts)])
    assert result.exit_code == 2
    assert "spec.parallelism.tensor: is 2, which does not divide num_attention_heads 9" in result.output
    nothing = CliRunner().invoke(app, ["validate", "-f", str(file), "--facts", str(tmp_path / "absent")])
    assert nothing.exit_code == 2
    assert "cannot be read: No such file or directory; pass a folder with a config.json" in nothing.output


@pytest.mark.parametrize("form", ["folder", "file", "standard input"])
def test_facts_are_taken_of_a_configuration_as_plan_takes_it(form: str, tmp_path: Path) -> None:
    configs = json.loads((Path(__file__).parents[2] / "golden" / "published_configs.json").read_text())
    file, config = tmp_path / "resource.yaml", tmp_path / "config.json"
    config.write_text(json.dumps(configs["SmolLM2-135M"]), encoding="utf-8")
    file.write_text(f"{HEAD}metadata: {{name: m}}\nspec: {{{SPEC}, parallelism: {{tensor: 2}}}}", encoding="utf-8")
    facts = {"folder": str(tmp_path), "file": str(config), "standard input": "-"}[form]
    result = CliRunner().invoke(app, ["validate", "-f", str(file), "--facts", facts], input=config.read_text())
    assert result.exit_code == 2
    assert "which does not divide num_attention_heads 9" in result.output
    both = CliRunner().invoke(app, ["validate", "-f", "-", "--facts", "-"], input=config.read_text())
    assert both.exit_code == 2
    assert "--facts: standard input is already used for the resources" in both.output
