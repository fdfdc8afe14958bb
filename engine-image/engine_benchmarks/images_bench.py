"""Cost of images for repeated requests and for text-only streams: `python -m engine_benchmarks.images_bench`.

On the CPU, with a small random Qwen2.5-VL that this command creates. Three tables:

- first token: a repeated image, by the caches that contain it: the processor's (patches, in the API server and, by
name, in the core), the encoder's (embeddings, in the core), and the KV cache's prefixes;
- wire: bytes from the API server to the core for such a request;
- with images: the gaps between tokens of text streams while other requests have images, by step budget. A small budget
makes gaps short and delays images; a large one does the opposite, as the tuning guide describes for
max_num_batched_tokens. In processor time, so that other work on the machine hardly changes it, and in turns.
"""

import argparse
import asyncio
import base64
import io
import json
import platform
import random
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from PIL import Image
from trimtab_engine.bench.local_server import SERVED_NAME, LocalServer, end_on_sigterm, local_server
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.core.engine import Engine
from trimtab_engine.core.startup import start_engine
from trimtab_engine.errors import EngineDead
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.multimodal.checkpoint import read_processors
from trimtab_engine.multimodal.decoding import Frames
from trimtab_engine.multimodal.items import MultiModalItem, Patches, Span
from trimtab_engine.multimodal.reader import item_of
from trimtab_engine.multimodal.sender_receiver_cache import Sender
from trimtab_engine.multimodal.worker import processed
from trimtab_engine.scheduling.sampling import Sampling

from engine_benchmarks.vision_checkpoint import IMAGE, MERGE_SIZE, PATCH_SIZE, TOKEN_IDS, write_vision_checkpoint

SHAPE = {"width": 256, "layers": 6, "vision_width": 128, "vision_layers": 6}
"""A vision encoder of about a fifth of the language model's parameters, as in the published models of 3 and 7
billion."""
SIDE = PATCH_SIZE * MERGE_SIZE  # pixels per token
LARGE_TOKENS = 16  # side of the image whose first token is timed: 448 pixels
SMALL_TOKENS = 4  # side of the images sent with text streams
IMAGES_PER_REQUEST = 4
STEPS_PER_REQUEST = 24  # steps between two requests with images: as many as the smallest budget needs for one
STREAMS = 64
WARM_UP_STEPS = 4
ROUNDS = 5
STEPS = 240
PERCENTILE = 99
MEANINGS = struct.pack("<768f", *([level / 255 - 0.5 for level in range(256)] * 3))  # of 8-bit values, three channels
Json = dict[str, Any]


def picture(side: int, seed: int) -> Image.Image:
    return Image.frombytes("RGB", (side, side), random.Random(seed).randbytes(3 * side * side))


def data_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


# --- first token ------------------------------------------------------------------------------------------------------


async def first_token_seconds(session: aiohttp.ClientSession, server: LocalServer, text: str, url: str) -> float:
    """Return the seconds until the first output token."""
    content = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"model": SERVED_NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0}
    started = time.perf_counter()
    async with session.post(f"{server.url}/v1/chat/completions", json=body) as answer:
        response_text = await answer.text()
        if answer.status != 200:
            raise EngineDead(f"{answer.status}: {response_text}")
    return time.perf_counter() - started


async def reset_processor_caches(session: aiohttp.ClientSession, server: LocalServer) -> None:
    async with session.post(f"{server.admin_url}/reset_mm_cache") as answer:
        if answer.status != 200:
            raise EngineDead(f"/reset_mm_cache answers {answer.status}: {await answer.text()}")


async def first_tokens(model: str, rounds: int) -> dict[str, float]:
    """Measure milliseconds by cache: medians over rounds, each with a new image. The text before the image is new each
    time except for the last one, so that the KV cache does not contain it.
    """
    tokens = str(LARGE_TOKENS**2)
    flags = ["--device", "cpu", "--load-format", "dummy", "--max-num-seqs", "4"]
    flags += ["--encoder-cache-size", tokens, "--max-num-encoder-input-tokens", tokens]  # room for one image
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with (
            local_server(model, flags, Path(folder) / "log") as server,
            aiohttp.ClientSession() as session,
        ):
            for number in range(-1, rounds):  # the first one warms up
                url, other = (data_url(picture(SIDE * LARGE_TOKENS, 2 * number + seed)) for seed in (100, 101))

                async def send_request(what: str, words: str, url: str = url, number: int = number) -> None:
                    seconds = await first_token_seconds(session, server, f"{words} {number}: ", url)
                    if number >= 0:
                        found.setdefault(what, []).append(1000 * seconds)

                await send_request("none", "first")
                await send_request("processor and encoder", "second")
                await send_request("processor, encoder and prefix", "second")
                await reset_processor_caches(session, server)
                await send_request("encoder", "third")
                await first_token_seconds(session, server, "another ", other)  # replaces it in the encoder's cache
                await send_request("processor", "fourth")
    return {what: statistics.median(times) for what, times in found.items()}


# --- wire -------------------------------------------------------------------------------------------------------------


def wire_bytes(model: str) -> dict[str, int]:
    """Return the bytes of a request with a new image, with a cached one, and without any."""
    processor = read_processors(model)["image"]
    made = processed(Frames([picture(SIDE * LARGE_TOKENS, 1)]), processor)
    item = item_of("image", b"\0" * 32, made, processor.meanings().tobytes())
    words = list(b"What is in this image?")
    token_ids = [*words, *[TOKEN_IDS[IMAGE]] * item.num_tokens]
    sender = Sender(4 << 30)

    def sent(token_ids: list[int], spans: tuple[Span, ...]) -> int:
        short, items = sender.shortened(token_ids, spans)
        return len(msgspec.msgpack.encode(AddRequest("r-0", short, Sampling(), arrival_time=0.0, spans=items)))

    spans = (Span(len(words), item),)
    new, known = sent(token_ids, spans), sent(token_ids, spans)
    return {"new image": new, "known image": known, "text only": sent(words, ())}


# --- with images ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Budget:
    """Step budget: `tokens` of text in addition to the streams', and `encoder_tokens` of images."""

    name: str
    tokens: int
    encoder_tokens: int


SMALL = SMALL_TOKENS**2
BUDGETS = (
    Budget("smallest: one image a step, a quarter of it read", SMALL // 4, SMALL),
    Budget("small: one image a step", SMALL, SMALL),
    Budget("large: all images of a request a step", 2048, 2048),
)


def make_engine(model: str, budget: Budget) -> Engine:
    config = EngineConfig(
        model=model,
        load_format="dummy",
        device_memory_bytes=4 << 30,
        num_gpu_blocks_override=4096,
        max_num_seqs=STREAMS + 16,
        max_num_seqs_cap=STREAMS + 16,
        max_num_batched_tokens=STREAMS + 16 + budget.tokens,
        max_num_batched_tokens_cap=STREAMS + 16 + budget.tokens,
        max_num_encoder_input_tokens=budget.encoder_tokens,
        encoder_cache_size=2048,
        limit_mm_per_prompt={"image": IMAGES_PER_REQUEST},
        cpu_threads=1,
    )
    return start_engine(config, lambda stage, percent: None, time.monotonic)[0]


def make_image(number: int) -> MultiModalItem:
    """Return a new image."""
    patches = SMALL_TOKENS * MERGE_SIZE
    row_size = 3 * 2 * PATCH_SIZE**2
    values = random.Random(number).randbytes(patches**2 * row_size)
    name = number.to_bytes(32, "big")
    return MultiModalItem("image", name, SMALL, (1, patches, patches), Patches(row_size, values, MEANINGS))


def make_image_request(name: str, number: int) -> AddRequest:
    token_ids = list(f"{number}: ".encode())
    spans = []
    for image in range(IMAGES_PER_REQUEST):
        item = make_image(number * IMAGES_PER_REQUEST + image)
        spans.append(Span(len(token_ids), item))
        token_ids += [TOKEN_IDS[IMAGE]] * item.num_tokens
    sampling = Sampling(temperature=0.0, max_tokens=2, ignore_eos=True)
    return AddRequest(name, [*token_ids, 63], sampling, time.monotonic(), spans=tuple(spans))


@dataclass(frozen=True, slots=True)
class WithImages:
    """Milliseconds of processor time. `itl_p99_ms` is that of the text streams; `ttft_ms`: a request with images, the
    median of its steps' sum until its first token.
    """

    budget: str
    itl_p50_ms: float
    itl_p99_ms: float
    alone_p99_ms: float
    ratio_of_p99: float
    ttft_ms: float
    images: int


class Load:
    """Text streams in an engine, to which requests with images are added."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._number = engine, 0
        self.gaps: dict[str, list[float]] = {"alone": [], "beside": []}
        self.waits: list[float] = []
        sampling = Sampling(temperature=0.0, max_tokens=100_000, ignore_eos=True)
        for stream in range(STREAMS):
            engine.add(AddRequest(f"text {stream}", list(f"{stream} tell ".encode()), sampling, time.monotonic()))
        begun: set[str] = set()
        while len(begun) < STREAMS:  # prompts are read while other requests decode
            begun |= {output.request_id for output in engine.step().outputs}

    def alone(self, steps: int) -> None:
        while any(self._step()[1]):
            pass
        for _ in range(steps):
            self.gaps["alone"].append(self._step()[0])

    def measure_with_images(self, steps: int) -> None:
        waiting: dict[str, float] = {}
        for step in range(WARM_UP_STEPS + steps):
            if step % STEPS_PER_REQUEST == 0:
                self._number += 1
                name = f"images {self._number}"
                waiting[name] = 0.0
                self._engine.add(make_image_request(name, self._number))
            seconds, seen = self._step()
            waiting = {name: so_far + seconds for name, so_far in waiting.items()}
            self.waits += [waiting.pop(name) for name in seen & waiting.keys()]
            if step >= WARM_UP_STEPS:
                self.gaps["beside"].append(seconds)

    def _step(self) -> tuple[float, set[str]]:
        """Return the processor seconds, and the requests with images that got a token."""
        started = time.process_time()
        outputs = self._engine.step().outputs
        seconds = time.process_time() - started
        return seconds, {o.request_id for o in outputs if o.token_ids and o.request_id.startswith("images")}


def measure_with_images(model: str, rounds: int, steps: int) -> list[WithImages]:
    """Measure one row per budget; with and without images, and the budgets, in turns."""
    engines = [make_engine(model, budget) for budget in BUDGETS]
    loads = [Load(engine) for engine in engines]
    for number in range(rounds):
        for budget, load in zip(BUDGETS, loads, strict=True):
            load.alone(steps // rounds)
            load.measure_with_images(steps // rounds)
            print(f"[images] round {number}, {budget.name}: done", file=sys.stderr, flush=True)
    rows = [_row(budget, load) for budget, load in zip(BUDGETS, loads, strict=True)]
    for engine in engines:
        engine.close()
    return rows


def _row(budget: Budget, load: Load) -> WithImages:
    alone, beside = (1000 * percentile(load.gaps[which], PERCENTILE) for which in ("alone", "beside"))
    return WithImages(
        budget.name,
        itl_p50_ms=1000 * statistics.median(load.gaps["beside"]),
        itl_p99_ms=beside,
        alone_p99_ms=alone,
        ratio_of_p99=beside / alone,
        ttft_ms=1000 * statistics.median(load.waits),
        images=len(load.waits) * IMAGES_PER_REQUEST,
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest value that at least `percent` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[-(-len(ordered) * percent // 100) - 1]


def measure(rounds: int, steps: int) -> Json:
    with tempfile.TemporaryDirectory() as folder:
        longest = {"max_model_len": 4096, "max_pixels": (SIDE * LARGE_TOKENS) ** 2}
        model = write_vision_checkpoint(Path(folder), **SHAPE, **longest)
        return {
            "machine": {
                "python": platform.python_version(),
                "torch": version("torch"),
                "processor": platform.machine(),
            },
            "first_token_ms": asyncio.run(first_tokens(model, rounds)),
            "wire_bytes": wire_bytes(model),
            "measure_with_images": [asdict(row) for row in measure_with_images(model, rounds, steps)],
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="images_bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each kind and budget, in all (default: {STEPS})")
    options = parser.parse_args(arguments)
    end_on_sigterm()
    print(json.dumps(measure(options.rounds, options.steps), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
