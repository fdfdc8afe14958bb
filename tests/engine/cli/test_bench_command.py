"""Arguments of the bench commands: vLLM's names, help with examples, rejection of unsupported flags."""

from argparse import Namespace
from pathlib import Path

import pytest
from trimtab_engine.cli import main
from trimtab_engine.cli.bench_serve_arguments import chosen_dataset
from trimtab_engine.errors import ConfigError

LATENCY = "--input-len --output-len --batch-size --n --num-iters-warmup --num-iters --output-json --profile"
THROUGHPUT = "--dataset-name --dataset-path --input-len --output-len --num-prompts --n --output-json --profile"
SERVE = (
    "--backend --base-url --host --port --endpoint --model --tokenizer --dataset-name --dataset-path --num-prompts "
    "--request-rate --burstiness --max-concurrency --ramp-up-strategy --ramp-up-start-rps --ramp-up-end-rps --seed "
    "--random-input-len --random-output-len --random-range-ratio --random-prefix-len --prefix-repetition-num-prefixes "
    "--sharegpt-output-len --custom-output-len --percentile-metrics --metric-percentiles --goodput --save-result "
    "--save-detailed --append-result --result-dir --result-filename --label --metadata --ignore-eos --extra-body "
    "--temperature --top-p --top-k --min-p --logprobs --header --num-warmups --ready-check-timeout-sec --profile "
    "--disable-tqdm --trace-path --trace-speedup --plot"
)


@pytest.mark.parametrize(("kind", "flags"), [("latency", LATENCY), ("throughput", THROUGHPUT), ("serve", SERVE)])
def test_help_names_every_flag_and_shows_examples(kind: str, flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", kind, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert [flag for flag in flags.split() if flag not in text] == []
    assert "examples:" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--request-rate", "0"], "not a number above 0"),
        (["--request-rate", "x"], "not a number above 0"),
        (["--trace-sample", "2"], "not a fraction"),
        (["--random-range-ratio", "1"], "not a ratio"),
        (["--extra-body", "{"], "invalid JSON"),
        (["--extra-body", "[1]"], "not a JSON object"),
        (["--max-concurrency", "0"], "is below 1"),
        (["--dataset-name", "hf"], "invalid choice"),
        (["--lora-modules", "a"], "--lora-modules is not supported yet"),
        (["--request-rat", "1"], "did you mean --request-rate"),
    ],
)
def test_wrong_argument_prints_one_line_and_exits_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", *arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "trace_path", "dataset_path", "chosen"),
    [
        (None, None, None, "random"),
        (None, Path("azure.csv"), None, "trace"),  # a given trace implies its dataset
        ("trace", Path("azure.csv"), None, "trace"),
        ("trace", None, Path("azure.csv"), "trace"),
        ("sharegpt", None, Path("x.json"), "sharegpt"),
    ],
)
def test_chosen_dataset_is_implied_by_given_files(
    name: str | None, trace_path: Path | None, dataset_path: Path | None, chosen: str
) -> None:
    assert chosen_dataset(Namespace(dataset_name=name, trace_path=trace_path, dataset_path=dataset_path)) == chosen


@pytest.mark.parametrize(
    ("name", "trace_path", "dataset_path", "message"),
    [
        ("random", Path("a.csv"), None, "--trace-path a.csv requires --dataset-name trace, not random"),
        ("random", None, Path("x.json"), "--dataset-name random generates its prompts and ignores --dataset-path"),
        (None, None, Path("x.json"), "--dataset-path x.json: unknown dataset type"),
        (None, None, Path("azure.csv"), "for a trace use --trace-path FILE"),
    ],
)
def test_conflicting_dataset_files_are_rejected(
    name: str | None, trace_path: Path | None, dataset_path: Path | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen_dataset(Namespace(dataset_name=name, trace_path=trace_path, dataset_path=dataset_path))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serve --dataset-name custom --dataset-path nowhere.jsonl", "--dataset-path nowhere.jsonl: no such file"),
        ("serve --dataset-name custom --dataset-path .", "--dataset-path .: is a folder"),
        ("serve --dataset-name sharegpt", "--dataset-name sharegpt requires --dataset-path FILE"),
        ("serve --dataset-name trace", "--dataset-name trace requires --trace-path FILE"),
        ("serve --trace-path nowhere.csv", "--trace-path nowhere.csv: no such file"),
        ("serve --tokenizer nowhere", "--tokenizer nowhere: no such folder"),
        ("serve --save-result --result-dir taken", "--result-dir taken: "),
        ("serve --append-result --result-filename taken", "--append-result: taken is not JSON"),
        ("serve --ramp-up-strategy linear", "requires --ramp-up-start-rps"),
        ("serve --header x", "use NAME=VALUE"),
        ("serve --base-url 127.0.0.1:8000", "--base-url 127.0.0.1:8000: not a URL; use http://127.0.0.1:8000"),
        ("serve --profile --admin-url localhost:8001", "--admin-url localhost:8001: not a URL; use http://local"),
        ("throughput --model m --dataset-name custom --dataset-path no.jsonl", "--dataset-path no.jsonl: no such file"),
        ("throughput --model m --output-json nowhere/x.json", "no such folder nowhere"),
        ("latency --model m --output-json .", "--output-json .: is a folder"),
    ],
)
def test_bench_checks_files_and_urls_before_it_starts(
    words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("no JSON")
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
