"""The offline LLM class on a tiny random model, compatible with vLLM."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trimtab_engine import LLM, SamplingParams
from trimtab_engine.errors import ConfigError, EngineDead, InvalidRequest
from trimtab_engine.messages.requests import StepStats

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TINY: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "device_memory_bytes": 4 << 30,
    "cpu_threads": 1,
    "max_model_len": 128,
    "num_gpu_blocks_override": 40,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), **TINY) as llm:
        yield llm


def test_package_import_loads_no_torch() -> None:
    code = "import sys, trimtab_engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=240).returncode == 0


def test_outputs_are_in_prompt_order_with_text_and_tokens(llm: LLM) -> None:
    prompts = ["one", "two and more", "three"]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == list(prompt.encode())
        assert output.finished
        (completion,) = output.outputs
        assert (len(completion.token_ids), completion.finish_reason, completion.index) == (12, "length", 0)
        assert completion.logprobs is None


def test_batch_equals_single_prompts(llm: LLM) -> None:
    prompts = ["a", "bb", "ccc " * 8]
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert together == alone


@pytest.mark.parametrize(
    "prompt",
    [list(b"abc"), {"prompt_token_ids": list(b"abc")}, {"prompt": "abc"}, [list(b"abc")], ["abc"], [{"prompt": "abc"}]],
)
def test_every_prompt_type_gives_the_same_output(llm: LLM, prompt: Any) -> None:
    expected = llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == expected


def test_seeded_choices_differ_and_are_reproducible(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=8)
    first, again = (
        [completion.token_ids for completion in llm.generate("x", params, use_tqdm=False)[0].outputs] for _ in range(2)
    )
    assert first == again
    assert len({tuple(tokens) for tokens in first}) == 3


def test_each_prompt_can_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (2, 5)]
    outputs = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 5]
    with pytest.raises(InvalidRequest, match="1 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], params[:1], use_tqdm=False)


def test_stop_string_ends_choice_and_frees_blocks(llm: LLM) -> None:
    text = llm.generate("a", GREEDY, use_tqdm=False)[0].outputs[0].text
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, stop=text[2:4])
    (completion,) = llm.generate("a", params, use_tqdm=False)[0].outputs
    assert (completion.text, completion.stop_reason) == (text[: text.find(text[2:4])], text[2:4])
    assert not llm.engine.has_work


def test_stop_string_that_is_a_special_token_ends_choice(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, stop=["<|pad|>", "x<|pad|>"], logit_bias={257: 100.0}, ignore_eos=True)
    (completion,) = llm.generate("a", params, use_tqdm=False)[0].outputs
    assert (completion.text, completion.token_ids) == ("", [257])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "<|pad|>")


def test_end_token_of_the_tokenizer_ends_choice(tiny_model: Path, tmp_path: Path) -> None:
    """config.json names another token; vLLM also stops at the tokenizer's."""
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": 5}))
    params = SamplingParams(max_tokens=4, logit_bias={256: 100.0})
    with LLM(str(tmp_path), **TINY) as llm:
        (completion,) = llm.generate("a", params, use_tqdm=False)[0].outputs
    assert (completion.token_ids, completion.finish_reason, completion.stop_reason) == ([256], "stop", None)


def test_chat_renders_the_template(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)
    assert output.prompt == "hi"
    several = llm.chat(
        [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]], GREEDY, use_tqdm=False
    )
    assert [one.prompt for one in several] == ["hi", "ho"]
    assert several[0].outputs[0].token_ids == output.outputs[0].token_ids


def test_chat_joins_text_parts_for_a_template_of_texts(llm: LLM) -> None:
    parts = [{"type": "text", "text": "A "}, {"type": "text", "text": "B"}]
    (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
    assert output.prompt == "A \nB"


def test_chat_passes_parts_to_a_template_of_parts(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    parts = [{"type": "text", "text": "A "}, {"type": "text", "text": "B"}]
    with LLM(str(tmp_path), **TINY) as llm:
        for content in (parts, "A B"):
            (output,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
            assert output.prompt == "A B"


def test_model_s_sampling_defaults_apply_without_params(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "max_new_tokens": 3}))
    with LLM(str(tmp_path), override_generation_config={"top_p": 0.5}, **TINY) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_p, params.max_tokens) == (0.0, 0.5, 3)
        first, second = (llm.generate("a", use_tqdm=False)[0].outputs[0].token_ids for _ in range(2))
        assert first == second
        assert len(first) <= 3
    with LLM(str(tmp_path), generation_config="vllm", **TINY) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_preempted_prompts_yield_the_same_output(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    alone = llm.generate("q", params, use_tqdm=False)[0].outputs[0].token_ids
    outputs = llm.generate(["q"] * 8, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [alone] * 8
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0


def test_logprobs_are_returned_for_every_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, ignore_eos=True)
    (completion,) = llm.generate("a", params, use_tqdm=False)[0].outputs
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 3
    for token, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entries[token].rank == 1
    assert completion.cumulative_logprob == pytest.approx(
        sum(entries[token].logprob for token, entries in zip(completion.token_ids, completion.logprobs, strict=True))
    )


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("a" * 128, "max_model_len is 128"),
        ([], "no tokens"),
        ([999], "outside the vocabulary"),
        ({"multi_modal_data": 1}, "multi_modal_data"),
    ],
)
def test_invalid_prompt_is_rejected_before_running(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(["fine", prompt], GREEDY, use_tqdm=False)
    assert not llm.engine.has_work


def test_logprobs_beyond_limit_are_rejected(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="max_logprobs=20"):
        llm.generate("a", SamplingParams(logprobs=21), use_tqdm=False)


def test_live_values_change_between_calls(llm: LLM) -> None:
    assert llm.patch_config(max_num_seqs=2)["desired"]["max_num_seqs"] == 2
    assert llm.config()["applied"]["max_num_seqs"] == 2
    with pytest.raises(ConfigError, match="max_num_seqs"):
        llm.patch_config(max_num_seqs=10**6)
    llm.patch_config(max_num_seqs=8)


def test_ctrl_c_stops_between_steps_and_llm_stays_usable(tiny_model: Path) -> None:
    steps: list[StepStats] = []

    def interrupt(stats: StepStats) -> None:
        steps.append(stats)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)

    with LLM(str(tiny_model), on_step=interrupt, **TINY) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
        assert len(steps) == 3
        assert not llm.engine.has_work
        llm.engine.check_integrity()
        assert len(llm.generate("a", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12


def test_use_after_shutdown_raises_engine_dead(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **TINY)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDead, match="was shut down"):
        llm.generate("a")


def test_invalid_keyword_is_rejected_before_loading() -> None:
    with pytest.raises(ConfigError, match="fully_sharded_loras is not supported; remove it"):
        LLM("/nowhere", fully_sharded_loras=True)
    with pytest.raises(ConfigError, match="cudagraph_mode"):
        LLM("/nowhere", compilation_config={"cudagraph_mode": "FULL"})


def test_repeated_prompt_is_cached(llm: LLM) -> None:
    prompt = "a prompt of more than two blocks, sent twice"
    llm.generate(prompt, GREEDY, use_tqdm=False)
    (again,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert again.num_cached_tokens == len(prompt) // 16 * 16


def test_prompt_logprobs_cover_all_tokens_but_the_first(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    (output,) = llm.generate("abcd", params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    first, *rest = output.prompt_logprobs
    assert first is None
    assert [ord(character) in (entries or {}) for character, entries in zip("bcd", rest, strict=True)] == [True] * 3


def test_structured_outputs_are_enforced(llm: LLM) -> None:
    params = SamplingParams(structured_outputs={"regex": "[ab]{3}-[0-9]{2}"}, max_tokens=20, seed=1)
    for output in llm.generate(["one", "two"], params, use_tqdm=False):
        assert re.fullmatch("[ab]{3}-[0-9]{2}", output.outputs[0].text)
        assert output.outputs[0].finish_reason == "stop"


def test_invalid_grammar_is_rejected_with_reason(llm: LLM) -> None:
    params = SamplingParams(structured_outputs={"regex": r"[^\s\S]"}, max_tokens=5)
    (output,) = llm.generate(["one"], params, use_tqdm=False)
    choice = output.outputs[0]
    assert (choice.finish_reason, choice.text) == ("error", "")
    assert choice.error


def test_grammar_error_is_one_sentence_with_position(llm: LLM) -> None:
    params = SamplingParams(structured_outputs={"regex": "ab(c"}, max_tokens=5)
    (output,) = llm.generate(["one"], params, use_tqdm=False)
    assert output.outputs[0].error == "the grammar cannot be built: unclosed group, at character 3"
