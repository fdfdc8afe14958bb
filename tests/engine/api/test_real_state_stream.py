"""The state stream of real engines: two routers predict hits of any API server and core, and lose no credit."""

import asyncio
import hashlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from adapter_folders import EVERY, an_adapter, modules_of
from media_files import a_picture, data_url, encoded
from trimtab_engine.models.checkpoint import expected_shapes
from trimtab_engine.models.registry import parse_model_config
from trimtab_router.endpoints.endpoint import Endpoint
from trimtab_router.scoring.state import ReplicaState
from trimtab_router.state_stream.client import StateStreams
from trimtab_router.state_stream.registry import Registry, dispatch_header
from vision_checkpoint import make_vision_checkpoint

if TYPE_CHECKING:
    from tests.engine.api.conftest import RealEngine, Serve

DEADLINE_SECONDS = 60.0
TEXT = "The quick brown fox jumps over the lazy dog while seven wizards quietly mix potions. "
ADMIN_TOKEN, STATE_TOKEN = "admin-token", "state-token"
CACHE = Path(os.environ.get("TRIMTAB_CACHE", "~/.cache/trimtab")).expanduser() / "models"
MODEL = CACHE / "SmolLM2-135M-Instruct"
LONG = ("--max-model-len", "2048", "--num-gpu-blocks-override", "600", "--max-num-batched-tokens", "256")
TINY = ("--max-model-len", "512", "--num-gpu-blocks-override", "100")
TOKEN_IDS = [number % 250 for number in range(400)]


def sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110  # set by another process
            await asyncio.sleep(0.01)


class Router:
    """A registry that follows one engine, and sends requests to it."""

    def __init__(self, engine: "RealEngine", token: str | None = None) -> None:
        self.registry = Registry(["tiny"])
        self._streams = StateStreams(self.registry)
        if token is not None:
            self.registry.set_token(token)
        self._http = httpx.AsyncClient(base_url=engine.http.base_url, timeout=DEADLINE_SECONDS)
        port, admin_port = engine.http.base_url.port, engine.admin.base_url.port
        assert port is not None
        self.registry.set_endpoints([Endpoint("a", "127.0.0.1", port, admin_port)])

    @property
    def state(self) -> ReplicaState:
        (state,) = self.registry.replicas(time.monotonic())
        return state

    @property
    def is_usable(self) -> bool:
        return bool(self.registry.replicas(time.monotonic()))

    def num_known(self, body: dict[str, Any], api_key: bytes | None = None, *, path: str = "") -> int:
        """Return how many leading keys of a request the engine has announced."""
        keys = self.registry.routed_request(body, path=path, api_key=api_key).keys
        return self.registry.index.match(keys, time.monotonic() + 1e6).get(0, 0)

    async def send(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        """Send a request, and wait until it is acknowledged before the router counts it as finished."""
        now = time.monotonic()
        number = self.registry.dispatched("a", self.registry.routed_request(body, path=path), now)
        headers |= {"x-trimtab-dispatch": dispatch_header(self.registry.router_id, number)}
        response = await self._http.post(path, json=body, headers=headers)
        await until(lambda: self.state.pending_requests == 0)
        self.registry.finished("a", number)
        return response

    async def close(self) -> None:
        await self._streams.close()
        await self._http.aclose()


@asynccontextmanager
async def following(engine: "RealEngine", token: str | None = None) -> AsyncIterator[Router]:
    router = Router(engine, token)
    try:
        await until(lambda: router.is_usable and router.state.reported_at is not None)
        await until(lambda: engine.http.get("/readyz").status_code == 200)
        yield router
    finally:
        await router.close()


async def test_routers_see_all_servers_and_cores_until_the_drain(serve: "Serve") -> None:
    engine = serve(*TINY, "--data-parallel-size", "2", "--api-server-count", "2")
    body = {"prompt": TOKEN_IDS, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    async with following(engine) as one, following(engine) as two:
        for rank in ("0", "1"):
            response = await one.send("/v1/completions", body, **{"X-data-parallel-rank": rank})
            assert response.status_code == 200
        num_keys = len(one.registry.routed_request(body).keys)
        for router in (one, two):
            await until(lambda: router.num_known(body) == num_keys)  # noqa: B023  # called within the loop
            await until(lambda: router.state.running == 0)  # noqa: B023
            assert router.state.pending_requests == 0
        assert engine.admin.post("/admin/v1/reset_prefix_cache").status_code == 200
        for router in (one, two):
            await until(lambda: router.num_known(body) == 0)  # noqa: B023
        engine.process.send_signal(signal.SIGTERM)
        await until(lambda: not one.is_usable and not two.is_usable)
    engine.process.wait(DEADLINE_SECONDS)
    assert engine.process.returncode == 0


async def test_refused_requests_are_acknowledged(serve: "Serve") -> None:
    engine = serve("--max-num-queued-tokens", "1")
    refused: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": 5}),
        ("/v1/completions", {"prompt": TEXT * 100}),
        ("/v1/completions", {"prompt": TEXT, "model": "unknown"}),
        ("/v1/completions", {"prompt": [100_000]}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/unknown", {}),
    ]
    async with following(engine) as router:
        for path, body in refused:
            assert (await router.send(path, body)).status_code in (400, 404)
        assert (await router.send("/v1/completions", {"prompt": TEXT, "max_tokens": 2})).status_code == 200
        assert (await router.send("/v1/embeddings", {"input": [TEXT, "b"]})).status_code == 200


async def test_state_token_opens_the_stream_only(serve: "Serve") -> None:
    engine = serve("--admin-token-sha256", sha256(ADMIN_TOKEN), "--state-token-sha256", sha256(STATE_TOKEN))
    headers = {"Authorization": f"Bearer {STATE_TOKEN}"}
    assert engine.admin.get("/admin/v1/config", headers=headers).status_code == 401
    assert engine.admin.get("/admin/v1/state?router=a").status_code == 401
    assert engine.admin.get("/admin/v1/state?router=a b", headers=headers).status_code == 400
    for token in (STATE_TOKEN, ADMIN_TOKEN):
        async with following(engine, token) as router:
            assert router.state.kv_total_tokens > 0


async def test_prompts_of_other_api_keys_and_salts_are_not_predicted(serve: "Serve") -> None:
    engine = serve(*TINY, "--api-key", "one", "two")
    body = {"prompt": TOKEN_IDS, "max_tokens": 2}
    async with following(engine) as router:
        await router.send("/v1/completions", body, Authorization="Bearer one")
        await until(lambda: router.num_known(body, b"one") > 0)
        assert router.num_known(body, b"two") == 0
        assert router.num_known(body | {"cache_salt": "x"}, b"one") == 0


async def test_adapters_have_own_keys_and_are_reported(serve: "Serve", tiny_model: Path, tmp_path: Path) -> None:
    shapes = expected_shapes(
        parse_model_config(json.loads((tiny_model / "config.json").read_text()), {}, "config.json")
    )
    adapter = an_adapter(tmp_path / "adapter", modules_of(shapes, EVERY), seed=1, size=0.5)
    engine = serve(*TINY, "--enable-lora", "--lora-modules", f"sql={adapter}")
    body = {"prompt": TOKEN_IDS, "max_tokens": 2}
    async with following(engine) as router:
        assert router.state.adapters == {"sql"}
        await router.send("/v1/completions", body | {"model": "sql"})
        await until(lambda: router.num_known(body | {"model": "sql"}) > 0)
        assert router.num_known(body) == 0
        assert router.num_known(body | {"model": "tiny"}) == 0


async def test_hits_after_images_are_predicted(serve: "Serve", tokenizer_folder: Path, tmp_path: Path) -> None:
    seeing = make_vision_checkpoint(tmp_path / "seeing", tokenizer_folder)
    config = seeing.folder / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 512', '"max_position_embeddings": 2048'))
    engine = serve("--max-model-len", "1400", "--num-gpu-blocks-override", "300", model=seeing.folder)

    def body(seed: int, end: str) -> dict[str, Any]:
        image = {"type": "image_url", "image_url": {"url": data_url(encoded(a_picture(60, 80, seed=seed)))}}
        content = [{"type": "text", "text": "Look: "}, image, {"type": "text", "text": TEXT * 10 + end}]
        return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "ignore_eos": True}

    async with following(engine) as router:
        first = await router.send("/v1/chat/completions", body(1, "a"))
        assert first.status_code == 200, first.text
        await until(lambda: router.num_known(body(1, "b")) == 1)
        assert router.num_known(body(2, "b")) == 0
        second = await router.send("/v1/chat/completions", body(1, "b"))
        cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= 512  # one token per byte, and the image


@pytest.mark.model
async def test_predicted_hits_of_real_chats_equal_actual_hits(serve: "Serve") -> None:
    """A chat template, its tokenizer and blocks: the prediction is at most one cut below or above the actual hits."""
    if not MODEL.exists():
        pytest.skip(f"no model at {MODEL}; make model")
    engine = serve(*LONG, model=MODEL)
    system = {"role": "system", "content": TEXT * 12}
    first = [system, {"role": "user", "content": "Explain: " + TEXT * 5}]
    second = [
        *first,
        {"role": "assistant", "content": "Yes. " + TEXT * 3},
        {"role": "user", "content": "Жизнь? 🙂 " * 9},
    ]
    chats: list[list[dict[str, Any]]] = [first, second, [system, {"role": "user", "content": "Why?"}], second, first]
    bodies: list[tuple[str, dict[str, Any]]] = [("/v1/chat/completions", {"messages": messages}) for messages in chats]
    bodies += [("/v1/completions", {"prompt": TEXT * count}) for count in (9, 20, 14)]
    hits = 0
    async with following(engine) as router:
        for path, body in bodies:
            body = {**body, "max_tokens": 2, "temperature": 0}
            request = router.registry.routed_request(body)
            predicted = router.num_known(body) * request.tokens_per_key
            usage = (await router.send(path, body)).json()["usage"]
            await until(lambda: router.num_known(body) == len(request.keys))  # noqa: B023
            actual = usage["prompt_tokens_details"]["cached_tokens"]
            assert predicted == pytest.approx(actual, abs=request.tokens_per_key + 16)
            hits += actual > 0
        assert hits >= 6


@pytest.mark.model
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_hits_of_messages_and_responses_are_predicted(serve: "Serve", path: str) -> None:
    if not MODEL.exists():
        pytest.skip(f"no model at {MODEL}; make model")
    engine = serve(*LONG, model=MODEL)
    turns = [{"role": "user", "content": "Explain: " + TEXT * 5}]
    later = [*turns, {"role": "assistant", "content": "Yes. " + TEXT * 3}, {"role": "user", "content": "Why?"}]

    def body(conversation: list[dict[str, str]]) -> dict[str, Any]:
        if path == "/v1/messages":
            return {"model": "tiny", "max_tokens": 2, "system": TEXT * 12, "messages": conversation}
        return {"model": "tiny", "max_output_tokens": 2, "instructions": TEXT * 12, "input": conversation}

    async with following(engine) as router:
        for conversation in (turns, later, turns):
            request = router.registry.routed_request(body(conversation), path=path)
            predicted = router.num_known(body(conversation), path=path) * request.tokens_per_key
            response = await router.send(path, body(conversation))
            assert response.status_code == 200, response.text
            usage = response.json()["usage"]
            await until(lambda: router.num_known(body(conversation), path=path) == len(request.keys))  # noqa: B023
            details = usage.get("input_tokens_details", {})
            actual = usage.get("cache_read_input_tokens", details.get("cached_tokens"))
            assert predicted == pytest.approx(actual, abs=request.tokens_per_key + 16)
        assert actual > 0
