"""Templates that do not end are ended, and nobody else waits for them."""

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
    """Renderers with half a second for a conversation."""
    monkeypatch.setattr(chat_renderer, "LIMITS", WorkerLimits(seconds=0.5, max_workers=2, max_waiting=10))
    made: list[ChatRenderer] = []

    async def make(template: str) -> ChatRenderer:
        made.append(ChatRenderer(ChatTemplates({"default": template}, {})))
        return made[-1]

    yield make
    for renderer in made:
        await renderer.close()


async def say(renderer: ChatRenderer, content: str, **more: Any) -> str:
    return await renderer.render([{"role": "user", "content": content}], max_characters=1000, **more)


async def test_conversations_are_rendered_by_the_template(make: Make) -> None:
    renderer = await make("{{ messages[0].content }}{{ tools[0].name }}{{ x }}")
    assert await say(renderer, "hi", tools=[{"name": "f"}], variables={"x": 1}) == "hif1"


async def test_half_a_surrogate_pair_becomes_the_replacement_character(make: Make) -> None:
    renderer = await make("{{ messages[0].content }}")
    assert await say(renderer, "a\ud800b") == "a\ufffdb"


async def test_a_conversation_that_does_not_end_is_400_while_others_are_rendered(make: Make) -> None:
    renderer = await make(ENDLESS_ON_DEMAND)
    await renderer.check()
    endless = asyncio.create_task(say(renderer, "loop"))
    assert await say(renderer, "hi") == "hi"
    assert not endless.done()
    with pytest.raises(ApiError, match=r"did not end well.*more than 0\.5 s") as refused:
        await endless
    assert refused.value.status == 400
    assert await say(renderer, "hi again") == "hi again"


async def test_a_conversation_that_fills_the_memory_is_400(make: Make) -> None:
    renderer = await make(GREEDY_ON_DEMAND)
    with pytest.raises(ApiError) as refused:
        await say(renderer, "grow")
    assert refused.value.status == 400
    assert await say(renderer, "hi") == "hi"


@pytest.mark.parametrize(
    ("template", "reason"), [("{% if %}", "line 1"), (LOOP, r"not written within 0\.5 s"), ("{{ a.b.c }}", "undefined")]
)
async def test_a_broken_template_is_noticed_when_it_is_loaded(make: Make, template: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        await (await make(template)).check()


async def test_a_template_that_knows_tools_is_known_to(make: Make) -> None:
    renderer = await make("{% if tools %}{{ tools }}{% endif %}")
    await renderer.check()
    assert renderer.uses_tools


async def test_without_a_template_a_conversation_is_400() -> None:
    renderer = ChatRenderer(ChatTemplates({}, {}))
    await renderer.check()
    with pytest.raises(ApiError, match="no chat template"):
        await say(renderer, "hi")
