"""Chat templates that do not terminate are stopped and do not block other requests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from trimtab_engine.api.http.errors import ApiError
from trimtab_engine.api.openai import chat_renderer
from trimtab_engine.api.openai.chat_renderer import ChatRenderer
from trimtab_engine.errors import ModelError
from trimtab_engine.ipc.bounded_worker import WorkerLimits
from trimtab_engine.text.chat_template import ChatTemplates

LOOP = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc") + "{% endfor %}" * 3
ENDLESS_ON_DEMAND = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}{{ messages[0].content }}"
GREEDY_ON_DEMAND = "{% if messages[0].content == 'grow' %}{{ 'a' * 10 ** 12 }}{% endif %}{{ messages[0].content }}"

Make = Callable[[str], Awaitable[ChatRenderer]]


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    """Renderers with a time limit of half a second."""
    monkeypatch.setattr(chat_renderer, "LIMITS", WorkerLimits(seconds=0.5, max_workers=2, max_waiting=10))
    made: list[ChatRenderer] = []

    async def make(template: str) -> ChatRenderer:
        made.append(ChatRenderer(ChatTemplates({"default": template}, {})))
        return made[-1]

    yield make
    for renderer in made:
        await renderer.close()


async def render(renderer: ChatRenderer, content: str, **more: Any) -> str:
    return await renderer.render([{"role": "user", "content": content}], max_characters=1000, **more)


async def test_conversation_is_rendered_by_template(make: Make) -> None:
    renderer = await make("{{ messages[0].content }}{{ tools[0].name }}{{ x }}")
    assert await render(renderer, "hi", tools=[{"name": "f"}], variables={"x": 1}) == "hif1"


async def test_lone_surrogate_becomes_replacement_character(make: Make) -> None:
    renderer = await make("{{ messages[0].content }}")
    assert await render(renderer, "a\ud800b") == "a\ufffdb"


async def test_endless_rendering_is_400_and_others_continue(make: Make) -> None:
    renderer = await make(ENDLESS_ON_DEMAND)
    await renderer.check()
    endless = asyncio.create_task(render(renderer, "loop"))
    assert await render(renderer, "hi") == "hi"
    assert not endless.done()
    with pytest.raises(ApiError, match=r"failed.*more than 0\.5 s") as refused:
        await endless
    assert refused.value.status == 400
    assert await render(renderer, "hi again") == "hi again"


async def test_rendering_above_memory_limit_is_400(make: Make) -> None:
    renderer = await make(GREEDY_ON_DEMAND)
    with pytest.raises(ApiError) as refused:
        await render(renderer, "grow")
    assert refused.value.status == 400
    assert await render(renderer, "hi") == "hi"


@pytest.mark.parametrize(
    ("template", "reason"), [("{% if %}", "line 1"), (LOOP, r"exceeds 0\.5 s"), ("{{ a.b.c }}", "undefined")]
)
async def test_invalid_template_is_detected_at_load(make: Make, template: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        await (await make(template)).check()


async def test_template_with_tools_is_detected(make: Make) -> None:
    renderer = await make("{% if tools %}{{ tools }}{% endif %}")
    await renderer.check()
    assert renderer.uses_tools


async def test_conversation_without_template_is_400() -> None:
    renderer = ChatRenderer(ChatTemplates({}, {}))
    await renderer.check()
    with pytest.raises(ApiError, match="no chat template"):
        await render(renderer, "hi")
