"""`trimtab plan`: inputs, output and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from trimtab_operator.cli.operator_command import app as operator_app
from trimtab_operator.cli.trimtab_command import app
from trimtab_operator.layout.facts import facts_of_config
from typer.testing import CliRunner, Result

CONFIGS: dict[str, Any] = json.loads((Path(__file__).parents[2] / "golden/published_configs.json").read_text())
DOCUMENT = Path(__file__).parents[3] / "docs/guides/layout-planning.md"


def plan(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments], input=stdin)


@pytest.fixture(autouse=True)
def no_width_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset COLUMNS, which the environment of the tests may set, as pytest-xdist does."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.mark.parametrize("words", [[], ["plan"], ["simulate"], ["replay"], ["validate"], ["render"], ["why"]])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_command_helps_whoever_types_either_flag(words: list[str], flag: str) -> None:
    result = CliRunner().invoke(app, [*words, flag])
    assert result.exit_code == 0
    assert " ".join(["Usage:", "root", *words, "[OPTIONS]"]) in " ".join(result.output.split())


@pytest.mark.parametrize("words", [[], ["run"], ["validate"], ["render"]])
def test_the_operators_program_helps_likewise(words: list[str]) -> None:
    result = CliRunner().invoke(operator_app, [*words, "-h"])
    assert result.exit_code == 0
    assert "Usage:" in result.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Llama-3.1-70B"]))
    return tmp_path


def test_the_table_is_ranked_and_says_why(folder: Path) -> None:
    result = plan(str(folder), "--gpu", "H100", "--max-model-len", "8192", "--limit", "2")
    assert result.exit_code == 0
    assert "70.55 billion parameters, 131.4 GiB of weights (bfloat16)" in result.output
    assert "1 node with 8 × H100" in result.output
    assert "every layer over 4 GPUs of one node" in result.output
    assert "more with --all" in result.output


def test_in_80_columns_no_line_is_longer_and_reasons_stand_below(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = plan(str(folder), "--gpu", "H100", "--max-model-len", "8192", "--limit", "2")
    assert result.exit_code == 0
    below_heading = result.output.splitlines()[2:]
    table, legend = (
        below_heading[:3],
        below_heading[below_heading.index("weights/GPU  weights on the rank with the most") :],
    )
    assert [line for line in (*table, *legend) if len(line) > 80] == []
    assert legend[-1] == "Times and rates are estimates for comparing rows."
    assert table[0].split()[:3] == ["TP", "PP", "GPUs"]
    assert "\n2: " in result.output
    assert "every layer over 4 GPUs of one node" in " ".join(result.output.split())


def test_json_holds_what_the_page_documents(folder: Path) -> None:
    result = plan(str(folder), "--gpu", "H100", "--max-model-len", "8192", "--all", "-o", "json")
    answer = json.loads(result.stdout)
    assert answer["num_rows"] == len(answer["rows"])
    best = answer["rows"][0]
    assert (best["place"], best["tensor"], best["pipeline"], best["replicas"]) == (1, 4, 1, 2)
    assert best["spec"] == {
        "parallelism": {"tensor": 4, "pipeline": 1, "data": 1, "expert": False, "gpusPerNode": 4},
        "replicas": 2,
    }
    rates = [row["tokens_per_second"] for row in answer["rows"]]
    assert rates == sorted(rates, reverse=True)
    refused = answer["refused"][0]
    assert refused["problems"][0].keys() == {"field", "value", "limit", "message"}
    page = DOCUMENT.read_text()
    for key in {*answer, *best, *refused, *answer["assumed"]}:
        assert f"`{key}`" in page, f"docs/guides/layout-planning.md does not say what {key} is"


def test_plan_reports_weights_in_gpu_format(folder: Path) -> None:
    asked = (str(folder), "--gpu", "H100", "--quantization", "fp8", "--max-model-len", "8192")
    answer = json.loads(plan(*asked, "-o", "json").stdout)
    assert answer["held_as"] == "fp8"
    assert answer["held_weights_bytes"] < 0.6 * answer["weights_bytes"]
    assert f"{answer['held_weights_bytes'] / 2**30:.1f} GiB of weights (fp8)" in plan(*asked).output


def test_the_batch_is_what_fits_and_at_most_max_num_seqs(folder: Path) -> None:
    asked = (str(folder), "--gpu", "H200", "--max-model-len", "8192", "--limit", "1")
    few = plan(*asked, "--max-num-seqs", "5")
    row = next(line for line in few.output.splitlines() if line.startswith("│ 1 │"))
    head = next(line for line in few.output.splitlines() if line.startswith("┃"))
    assert row.split("│")[head.split("┃").index(" batch ")].strip() == "5"
    assert "at most max_num_seqs 5" in few.output


def test_plan_groups_rejected_layouts_by_reason(folder: Path) -> None:
    asked = (str(folder), "--gpu", "L4", "--gpus-per-node", "8")
    refused = json.loads(plan(*asked, "-o", "json", "--all").stdout)["refused"]
    table = plan(*asked).output.split("Rejected", 1)[1]
    rows = [cells for line in table.splitlines() if (cells := line.split("│"))[1:2] and cells[1].strip()]
    assert sum(int(cells[1]) for cells in rows) == len(refused)
    assert len(rows) < len(refused) / 2
    assert table.count("of the GPU's 22.0 GiB (L4)") == table.count("closest: ") == 1
    assert "closest: spec.parallelism is tensor 8 × pipeline 1, but" in " ".join(table.split())


def test_the_version_is_told() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"trimtab {version('trimtab')}\n")


def test_facts_that_inspect_printed_are_read_from_standard_input(folder: Path) -> None:
    facts = facts_of_config(CONFIGS["Llama-3.1-8B"], "/models/m").to_json()
    result = plan("-", "--gpu", "L4", "--gpus-per-node", "2", "-o", "json", stdin=json.dumps(facts))
    answer = json.loads(result.stdout)
    assert (answer["model"], answer["gpus_per_node"]) == ("/models/m", 2)


def test_plan_without_valid_layout_exits_1_with_reasons(folder: Path) -> None:
    result = plan(str(folder), "--gpu", "L4", "--gpus-per-node", "2")
    assert result.exit_code == 1
    assert "No layout of this model works on these GPUs" in result.output
    assert "131.4 GiB of weights" in result.output.replace("\n", " ")


def test_deepseek_is_planned_without_a_note(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["DeepSeek-V3"]))
    result = plan(str(tmp_path), "--gpu", "H200", "--nodes", "2", "--max-model-len", "32768")
    assert result.exit_code == 0
    assert "Note:" not in result.output


@pytest.mark.parametrize(
    ("model", "scheme", "reason"),
    [
        ("Llama-3.1-8B", {"quant_method": "fp8", "weight_block_size": [64, 64]}, "fp8 with weight_block_size [64, 64]"),
        ("Llama-4-Scout", {"quant_method": "awq", "bits": 4}, "quant_method 'awq'"),
    ],
)
def test_plan_of_unsupported_quantization_names_the_reason(
    tmp_path: Path, model: str, scheme: dict[str, Any], reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[model] | {"quantization_config": scheme}))
    output = plan(str(tmp_path), "--gpu", "H200").output.replace("\n", " ")
    assert f"does not run {CONFIGS[model]['architectures'][0]} (config.json" in output
    assert reason in output
    assert "counted as unquantized" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "H300"], "--gpu: unknown GPU ('H300')"),
        (["--gpu", "H100", "--gpu-memory-utilization", "1.5"], "'1.5' is not a fraction"),
        (["--gpu", "H100", "--gpu-memory-utilization", "nan"], "'nan' is not a fraction"),
        (
            ["--gpu", "H100", "--max-model-len", "131073"],
            "--max-model-len: is 131073, but the model's positions allow 1 to 131072",
        ),
        (["--gpu", "H100", "--prompt-tokens", "131073"], "--prompt-tokens: is 131073, but the model's positions"),
        (["--gpu", "A100", "--kv-cache-dtype", "fp8"], "--kv-cache-dtype: is fp8, which A100-80 does not support"),
        (["--gpu", "A100", "--kv-cache-dtype", "fp8_e4m3"], "use fp8_e5m2 or auto"),
    ],
)
def test_options_that_cannot_be_end_with_2(folder: Path, arguments: list[str], message: str) -> None:
    result = plan(str(folder), *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_an_fp8_cache_that_is_converted_is_planned_on_any_gpu(folder: Path) -> None:
    result = plan(str(folder), "--gpu", "A100", "--kv-cache-dtype", "fp8_e5m2", "--max-model-len", "8192", "-o", "json")
    assert json.loads(result.stdout)["assumed"]["kv_dtype_bytes"] == 1


def test_a_model_with_few_positions_is_planned_with_prompts_that_it_takes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Llama-3.1-8B"] | {"max_position_embeddings": 512}))
    result = plan(str(tmp_path), "--gpu", "H100", "-o", "json")
    assert json.loads(result.stdout)["assumed"]["prompt_tokens"] == 512


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("[" * 100_000, "not JSON"),
        ("{}", "/config.json: names no architecture"),
        ('{"architectures": ["X"]}', "/config.json: architecture 'X' is not known"),
        ('{"architecture": "LlamaForCausalLM"}', "weights_by_part is None"),
        (None, "cannot be read: No such file or directory; pass a folder with a config.json"),
    ],
)
def test_a_model_that_cannot_be_read_ends_with_2(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    result = plan(str(tmp_path), "--gpu", "H100")
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_name_on_the_hub_is_told_how_its_config_comes_here() -> None:
    result = plan("Qwen/Qwen3-8B", "--gpu", "H100")
    assert result.exit_code == 2
    assert "run `hf download Qwen/Qwen3-8B config.json --local-dir FOLDER` and pass FOLDER" in " ".join(
        result.stderr.split()
    )


def test_a_name_without_its_organisation_is_told_the_form_of_names_on_the_hub() -> None:
    result = plan("Qwen3-8B", "--gpu", "H100")
    assert result.exit_code == 2
    assert "Models on the Hugging Face hub are named ORG/NAME: run `hf download ORG/Qwen3-8B" in " ".join(
        result.stderr.split()
    )
    assert "hub" not in plan("facts.json", "--gpu", "H100").stderr


def test_neither_the_engine_nor_a_cluster_client_is_imported(folder: Path) -> None:
    code = (
        "import sys; from trimtab_operator.cli.trimtab_command import app\n"
        "try: app(['plan', sys.argv[1], '--gpu', 'H100', '-o', 'json'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'kopf', 'kubernetes', 'trimtab_engine'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, stdout=subprocess.DEVNULL)
