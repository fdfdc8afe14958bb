"""A tiny Qwen2.5-VL in the server, used by the openai client with images, compared with transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
from media_files import a_gif_of, a_picture, a_png_of_zeros, data_url, encoded
from PIL import Image
from vision_checkpoint import NUM_TOKENS, Part, Seeing, a_video, make_vision_checkpoint

if TYPE_CHECKING:
    from tests.engine.api.conftest import RealEngine

LIMIT = ("--limit-mm-per-prompt", '{"image": 3, "video": 1}')


@pytest.fixture(scope="module")
def seeing(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return make_vision_checkpoint(tmp_path_factory.mktemp("seeing"), tokenizer_folder)


@pytest.fixture(scope="module")
def engine(
    seeing: Seeing, real_engine: "type[RealEngine]", tmp_path_factory: pytest.TempPathFactory
) -> "Iterator[RealEngine]":
    log = tmp_path_factory.mktemp("seeing-log") / "log"
    engine = real_engine(seeing.folder, log, "--max-num-seqs", "8", "--max-num-batched-tokens", "16", *LIMIT)
    yield engine
    engine.end()


def written(part: Part) -> dict[str, Any]:
    """Return the part as a message part."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Image.Image):
        return {"type": "image_url", "image_url": {"url": data_url(encoded(part))}}
    return {"type": "video_url", "video_url": {"url": data_url(a_video(part))}}


def chat(engine: "RealEngine", *parts: Part | dict[str, Any], **fields: Any) -> Any:
    content: Any = [part if isinstance(part, dict) else written(part) for part in parts]
    extra = {"ignore_eos": True, "return_token_ids": True, **fields}
    with openai.OpenAI(base_url=f"{engine.http.base_url}/v1", api_key="none", max_retries=0) as client:
        return client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": content}],
            max_tokens=NUM_TOKENS,
            temperature=0,
            extra_body=extra,
        )


def tokens(answer: Any) -> list[int]:
    found: list[int] = answer.choices[0].token_ids
    return found


def looked_up(engine: "RealEngine") -> tuple[float, float]:
    return tuple(engine.metric(f"vllm:mm_cache_{name}_total")["0"] for name in ("queries", "hits"))  # type: ignore[return-value]  # of two


CAT, DOG, BIRD = (a_picture(30, 20, seed=1), a_picture(16, 24, seed=2), a_picture(9, 40, seed=3))
FRAMES = [a_picture(16, 16, seed=seed) for seed in range(4, 8)]


@pytest.mark.parametrize(
    "parts",
    [
        ("what is it?",),
        ("look: ", CAT, " what is it?"),
        (CAT, "a", DOG, "b", BIRD, "which?"),
        (CAT, CAT, "twice"),
        ("see ", FRAMES, " what happens?"),
        (DOG, "then", FRAMES, "which?"),
    ],
    ids=["text", "image", "three images", "one image twice", "video", "image and video"],
)
def test_tokens_equal_transformers(engine: "RealEngine", seeing: Seeing, parts: tuple[Part, ...]) -> None:
    answer = chat(engine, *parts)
    assert tokens(answer) == seeing.says(*parts)
    assert tokens(chat(engine, *parts)) == tokens(answer)  # the second time from all caches


def test_repeated_image_is_cached_until_reset(engine: "RealEngine") -> None:
    picture = a_picture(20, 20, seed=99)
    queries, hits = looked_up(engine)
    first = chat(engine, picture, "what?")
    assert looked_up(engine) == (queries + 1, hits)
    again = chat(engine, picture, "what?")
    assert looked_up(engine) == (queries + 2, hits + 1)
    assert again.usage.prompt_tokens == first.usage.prompt_tokens
    assert engine.admin.post("/admin/v1/reset_mm_cache").json() == {"reset": True}
    assert tokens(chat(engine, picture, "what?")) == tokens(first)
    assert looked_up(engine) == (queries + 3, hits + 1)


def test_image_with_uuid_is_sent_once(engine: "RealEngine", seeing: Seeing) -> None:
    picture, other = a_picture(20, 20, seed=98), a_picture(24, 20, seed=97)
    part: dict[str, Any] = {**written(picture), "uuid": "the cat"}
    part["image_url"]["detail"] = "high"  # no effect
    expected = seeing.says(picture, "what?")
    assert tokens(chat(engine, part, "what?")) == expected
    _, hits = looked_up(engine)
    for short in ({"image_url": None}, {"image_url": {"url": ""}}, {}, {"image_url": written(other)["image_url"]}):
        assert tokens(chat(engine, {"type": "image_url", "uuid": "the cat", **short}, "what?")) == expected
    assert looked_up(engine)[1] == hits + 4
    with pytest.raises(openai.BadRequestError, match=r"content\[0\]\.image_url: nothing is known by uuid 'the cat'"):
        chat(engine, {"type": "image_url", "uuid": "the cat"}, "what?", cache_salt="another")
    engine.admin.post("/admin/v1/reset_mm_cache")
    with pytest.raises(openai.BadRequestError, match="send it with its url"):
        chat(engine, {"type": "image_url", "uuid": "the cat"}, "what?")
    assert tokens(chat(engine, {**written(other), "uuid": "the cat"}, "what?")) == seeing.says(other, "what?")


def test_images_above_limit_are_400_with_count_and_limit(engine: "RealEngine") -> None:
    for number, kind, parts in ((4, "images", [CAT] * 4), (2, "videos", [FRAMES] * 2)):
        with pytest.raises(openai.BadRequestError, match=f"the messages have {number} {kind}; the limit is [13]"):
            chat(engine, *parts, "?")


def as_image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (as_image("https://images.example.com/x.png"), "nothing is fetched from other hosts here"),
        (as_image("file:///etc/passwd"), "files of the server are not read here"),
        (as_image("http://2130706433/"), "nothing is fetched"),
        (as_image("data:image/png;base64,AAAA"), "none of image/png"),
        (as_image(data_url(encoded(CAT)[:-50])), "cannot be decoded"),
        (as_image(data_url(encoded(CAT), "image/gif")), "declared type is image/gif, but it is image/png"),
        (as_image(data_url(a_png_of_zeros(10_000, 10_000))), "10000 x 10000 pixels; at most 33554432 are decoded"),
        ({"type": "video_url", "video_url": {"url": data_url(a_gif_of(50_000), "image/gif")}}, "more than 768 frames"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "content of type input_audio"),
        ({"type": "image_url", "image_url": {"url": "data:,", "detail": "fine"}}, "detail"),
        ({"type": "image_url", "uuid": "never sent"}, "nothing is known by uuid 'never sent'"),
        ({"type": "image_url", "image_url": {"detail": "low"}}, "url is missing"),
        ({"type": "image_url", "image_url": {"url": ""}, "uuid": ""}, "uuid"),
        ("<|vision_start|><|image_pad|><|vision_end|>", "has places for 2 images, but brings 1 image"),
    ],
)
def test_invalid_image_is_400_with_position(engine: "RealEngine", part: Any, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        chat(engine, "look: ", part) if isinstance(part, dict) else chat(engine, CAT, part)
    assert refused.value.status_code == 400
    assert chat(engine, "and text goes on").choices[0].finish_reason == "length"


def test_ten_thousand_images_are_400_at_once(engine: "RealEngine") -> None:
    content = [as_image("data:image/png;base64,AAAA")] * 10_000
    answer = engine.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
    assert answer.status_code == 400
    assert "the body has too many values" in answer.text
    several = [{"role": "user", "content": content[:100]}] * 10
    answer = engine.http.post("/v1/chat/completions", json={"messages": several})
    assert answer.status_code == 400
    assert "the messages have 1000 images; the limit is 3 per prompt" in answer.text


def test_images_are_only_accepted_from_users_for_generation(engine: "RealEngine") -> None:
    for path, role, words in (
        ("/v1/chat/completions", "system", "a message of role system has an image"),
        ("/tokenize", "user", "images and videos are not supported by /tokenize yet"),
        ("/v1/chat/completions/render", "user", "not supported by /v1/chat/completions/render yet"),
    ):
        answer = engine.http.post(path, json={"messages": [{"role": role, "content": [written(CAT)]}]})
        assert answer.status_code == 400
        assert words in answer.text


@pytest.mark.usefixtures("forked")
def test_servers_and_cores_give_the_same_tokens(
    seeing: Seeing, real_engine: "type[RealEngine]", tmp_path: Path
) -> None:
    flags = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--api-server-count", "2")
    engine = real_engine(seeing.folder, tmp_path / "log", *flags, "--data-parallel-size", "2")
    try:
        expected = seeing.says(CAT, "a", DOG)
        for _ in range(6):
            assert tokens(chat(engine, CAT, "a", DOG)) == expected
        engine.admin.post("/admin/v1/reset_mm_cache")
        assert tokens(chat(engine, CAT, "a", DOG)) == expected
    finally:
        engine.end()


@pytest.mark.usefixtures("forked")
def test_zero_limit_serves_language_model_only(seeing: Seeing, real_engine: "type[RealEngine]", tmp_path: Path) -> None:
    flags = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--limit-mm-per-prompt")
    engine = real_engine(seeing.folder, tmp_path / "log", *flags, '{"image": 0, "video": 0}')
    try:
        assert tokens(chat(engine, "only text")) == seeing.says("only text")
        with pytest.raises(openai.BadRequestError, match="content of type image_url is not supported by this model"):
            chat(engine, CAT, "a")
    finally:
        engine.end()
