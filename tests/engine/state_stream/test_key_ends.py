"""Ends of prefix keys in tokens: equal keys stand for equal leading tokens, with any tokenizer and chat template."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from trimtab_engine.api.openai.prefix_cuts import text_cuts, token_id_cuts
from trimtab_engine.messages.state_stream import PrefixCuts
from trimtab_engine.state_stream.key_ends import align_token_bytes, expanded_ends, text_ends, token_ends
from trimtab_engine.text.builtin_templates import builtin_template
from trimtab_engine.text.chat_template import ChatTemplate
from trimtab_engine.text.tokenizer import Tokenizer
from trimtab_router.protocol.prefix_keys import CUT_BYTES, canonical_prompts

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "mix",
    "potions,",
    "naïve",
    "façade",
    "—",
    "жизнь",
    "人生",
    "🙂",
]
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TRIMMING = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}"
DROPPING = "{% for m in messages %}{% if m.role != 'assistant' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
TEMPLATES = {"chatml": CHATML, "trimming": TRIMMING, "dropping": DROPPING, "hermes": str(builtin_template("hermes"))}
TOOL = {"type": "function", "function": {"name": "now", "description": "The time. " * 90, "parameters": {}}}


def make_text(rng: random.Random, num_words: int) -> str:
    blank = rng.choice(["", "", "  ", "\n"])
    return blank + " ".join(rng.choices(WORDS, k=num_words)) + rng.choice(["", blank])


def train(kind: str, folder: Path) -> Tokenizer:
    """Return a small tokenizer of this kind, trained on the tests' words."""
    corpus = [make_text(random.Random(seed), 50) for seed in range(50)] + ["<|im_start|> [user] system assistant tool"]
    if kind == "byte-level":
        fast = FastTokenizer(models.BPE())
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=600,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
            show_progress=False,
        )
    else:
        fast = FastTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        fast.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=800,
            special_tokens=["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))],
            show_progress=False,
        )
    if kind == "normalizing":
        fast.normalizer = normalizers.NFKC()
    fast.train_from_iterator(corpus, trainer)
    if kind != "byte-level":
        fast.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", fast.token_to_id("<s>"))])
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return Tokenizer(str(folder))


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece", "normalizing"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train(request.param, tmp_path_factory.mktemp(request.param))


def num_equal(one: Sequence[int], two: Sequence[int]) -> int:
    pairs = enumerate(zip(one, two, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(two)))


async def cuts_of(
    tokenizer: Tokenizer, body: dict[str, Any], template: ChatTemplate | None = None
) -> tuple[PrefixCuts, list[int]]:
    """Return the keys of a request and its tokens, as the API server computes them."""
    (form,) = canonical_prompts(body)
    text = body["prompt"] if template is None else template.render(body["messages"], tools=body.get("tools"))
    token_ids = tokenizer.encode(text, add_special_tokens=template is None)
    return await text_cuts(tokenizer, form, text, token_ids, add_special_tokens=template is None), token_ids


def check_claim(one: tuple[PrefixCuts, list[int]], two: tuple[PrefixCuts, list[int]], slack: int) -> int:
    """Check that shared keys stand for shared tokens, except for the last `slack` of them. Return their number."""
    shared = num_equal(one[0].keys, two[0].keys)
    if shared:
        claimed = min(one[0].ends[shared - 1], two[0].ends[shared - 1])
        assert num_equal(one[1], two[1]) >= claimed - slack
    return shared


@pytest.mark.parametrize("seed", range(6))
async def test_shared_keys_of_texts_stand_for_shared_tokens(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    common = make_text(rng, 400)
    one, two = [await cuts_of(tokenizer, {"prompt": common + make_text(rng, 200)}) for _ in range(2)]
    assert check_claim(one, two, slack=3) == len(common.encode()) // CUT_BYTES
    last = one[0].ends[-1]
    tail = len(one[1]) - last
    assert 0 <= tail < 600  # the last key ends at most one cut before the end of the text
    assert one[0].ends == sorted(one[0].ends)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("seed", range(4))
async def test_shared_keys_of_chats_stand_for_shared_tokens(tokenizer: Tokenizer, name: str, seed: int) -> None:
    rng, template = random.Random(seed), ChatTemplate(TEMPLATES[name], {})
    common: list[dict[str, Any]] = [{"role": "system", "content": make_text(rng, 150)}]
    for _ in range(rng.randrange(1, 4)):
        common += [
            {"role": "user", "content": make_text(rng, rng.randrange(1, 150))},
            {"role": "assistant", "content": make_text(rng, rng.randrange(1, 100))},
        ]
    start = make_text(rng, 120)
    bodies: list[dict[str, Any]] = [
        {"messages": [*common, {"role": "user", "content": start + make_text(rng, 60)}]},
        {"messages": [*common, {"role": "user", "content": start + make_text(rng, 200)}]},
    ]
    if rng.random() < 0.5:
        for body in bodies:
            body["tools"] = [TOOL]
    one, two = [await cuts_of(tokenizer, body, template) for body in bodies]
    shared = check_claim(one, two, slack=12)
    size = sum(len(message["content"].encode()) for message in common)
    assert shared >= size // CUT_BYTES - (name == "dropping") * 5


async def test_end_of_long_text_is_exact_for_byte_tokens(tokenizer_folder: Path) -> None:
    cuts, _ = await cuts_of(Tokenizer(str(tokenizer_folder)), {"prompt": "a" * 5000})
    assert cuts.ends == list(range(512, 5000, 512))
    assert cuts.num_bytes == 5000


def test_token_ids_have_ends_every_128_tokens() -> None:
    (form,) = canonical_prompts({"prompt": list(range(300))})
    cuts = token_id_cuts(form)
    assert (len(cuts.keys), cuts.ends) == (2, [128, 256])


def test_key_within_tools_ends_at_next_content() -> None:
    (form,) = canonical_prompts({"tools": [TOOL], "messages": [{"role": "user", "content": "b" * 600}]})
    text = b"TOOLS" * 50 + b"<user>" + b"b" * 600
    ends = text_ends(form, text, 99)
    assert ends[0] == 256
    assert ends[-1] < len(text)
    assert ends == sorted(ends)


def test_keys_after_last_found_content_are_dropped() -> None:
    messages = [{"role": "user", "content": "b" * 600}, {"role": "assistant", "content": "c" * 3000}]
    (form,) = canonical_prompts({"messages": messages})
    assert text_ends(form, b"<user>" + b"b" * 600, 99) == [6 + 512 - len(b"\xfeuser\xfb")]


def test_number_of_fruitless_searches_is_bounded() -> None:
    messages = [{"role": "user", "content": f"{number} missing"} for number in range(4000)]
    messages.append({"role": "user", "content": "b" * 600})
    (form,) = canonical_prompts({"messages": messages})
    assert text_ends(form, b"b" * 600, 999) == []


def test_token_ends_count_tokens_before_positions() -> None:
    assert token_ends([0, 2, 3, 7], [2, 1, 3, 1]) == [0, 1, 2, 4]


@pytest.mark.parametrize(
    ("token_bytes", "num_bytes", "begins_special", "expected"),
    [
        ([2, 3], 5, False, [2, 3]),
        ([3, 2, 3], 5, True, [0, 2, 3]),  # <s> is not in the text
        ([3, 3], 5, False, [2, 3]),  # a blank before the first word
        ([3, 3, 3], 5, True, [0, 2, 3]),
        ([3, 3], 6, True, [3, 3]),  # <s> is in the text
    ],
)
def test_token_bytes_are_aligned_with_their_text(
    token_bytes: list[int], num_bytes: int, begins_special: bool, expected: list[int]
) -> None:
    assert align_token_bytes(token_bytes, num_bytes, begins_special=begins_special)
    assert token_bytes == expected


def test_tokens_of_another_text_are_not_aligned() -> None:
    assert not align_token_bytes([2, 3], 9, begins_special=False)


def test_ends_are_shifted_by_expanded_images() -> None:
    assert expanded_ends([1, 2, 3, 5, 6], placeholders=[2, 4], expanded=[12, 24]) == [1, 2, 12, 24, 25]
    assert expanded_ends([1, 2, 3], placeholders=[2], expanded=()) == [1, 2]
