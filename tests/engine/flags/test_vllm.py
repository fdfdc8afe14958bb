"""The flags of `vllm serve`: none is unrecognized, and the engine's message about each is true."""

import json
from pathlib import Path

import pytest
from trimtab_engine import cli
from trimtab_engine.flags.vllm import OtherFlag, vllm_flags

VLLM = json.loads((Path(__file__).parents[2] / "golden" / "vllm_0_32_flags.json").read_text())
"""Names of the flags of vLLM 0.32, from its own parser."""
OLD = [
    "--disable-log-requests",
    "--no-enable-log-requests",
    "--enable-reasoning",
    "--guided-decoding-backend=xgrammar",
    "--task=generate",
    "--num-scheduler-steps=1",
    "--disable-frontend-multiprocessing",
    "--use-v2-block-manager",
    "--max-seq-len-to-capture=8192",
    "--rope-theta=1",
    "--cuda-graph-sizes=8",
    "--tokenizer-pool-size=0",
]


def outcome(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return what serve prints about these flags; empty if they are accepted."""
    try:
        cli._parser().parse_args(["serve", "/m", *flags])
    except SystemExit:
        return capsys.readouterr().err
    return ""


def test_each_flag_of_vllm_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    serve = cli._parser().command("serve")
    unknown = [name for flag in VLLM for name in flag["names"] if name not in serve._option_string_actions]
    assert unknown == []
    assert [flag for flag in OLD if "unrecognized" in outcome(capsys, flag)] == []


def test_switches_of_vllm_take_no_value() -> None:
    serve = cli._parser().command("serve")
    wrong = [
        name
        for flag in VLLM
        for name in flag["names"]
        if isinstance(action := serve._option_string_actions[name], OtherFlag) and (action.nargs == 0) != flag["switch"]
    ]
    assert wrong == []


def test_rejected_flags_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    text = outcome(capsys, "--rope-scaling={}", "--convert", "embed", "--enable-foo", "--middleware=a")
    assert text.count("\n") == 1
    for part in ("rope_parameters", "--convert other than auto or none", "--middleware", "unrecognized arguments"):
        assert part in text


def test_hf_overrides_are_rejected_with_another_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert "set the fields in config.json of a copy of the model's folder" in outcome(capsys, '--hf-overrides={"a":1}')
    assert outcome(capsys, "--hf-overrides={}") == ""


@pytest.mark.parametrize("flag", ["--kv-offloading-size=0", "--no-fully-sharded-loras", "--tokenizer-mode=auto"])
def test_flag_that_asks_for_nothing_is_accepted(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert outcome(capsys, flag) == ""


def test_ignored_flags_are_collected_with_the_reason() -> None:
    parsed = cli._parser().parse_args(["serve", "/m", "--attention-backend", "FLASHINFER", "--enable-sleep-mode"])
    assert parsed.ignored_flags == [
        "--attention-backend has no effect: the engine selects its kernels",
        "--enable-sleep-mode has no effect: it is always on",
    ]


def test_underscores_are_read_as_dashes() -> None:
    parsed = cli._parser().parse_args(["serve", "/m", "--max_model_len=16384", "--served_model_name", "a_b"])
    assert parsed.max_model_len == 16384
    assert parsed.served_model_name == ["a_b"]


@pytest.mark.parametrize("flag", ["--disable-log-requets", "--disable-log-request-x", "--hf-tokens", "--converts"])
def test_opposite_or_unlike_flag_is_not_suggested(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert "did you mean" not in outcome(capsys, flag)


def test_dtype_aliases_of_vllm_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(capsys, "--dtype", "half") == outcome(capsys, "--dtype=float") == ""


def test_table_lists_each_flag_once() -> None:
    names = [name for entry in vllm_flags() for name in entry.names]
    assert len(names) == len(set(names))
