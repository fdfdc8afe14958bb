"""Nothing of an ended request stays in the core, except for the requests of the last step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import engine_builders
import pytest
from calling_recorder import steps_of_a_device
from served import serve
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling

NUM_REQUESTS = 60
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 0.8, "presence_penalty": 0.5, "top_p": 0.9},
    {"temperature": 0.0, "logit_bias": {4: 2.0}, "logprobs": 3},
    {"temperature": 0.5, "prompt_logprobs": 2},
    {"temperature": 0.0, "bad_words": ((5, 6),), "min_tokens": 2},
]
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
DRAFTS = {"speculative": NGRAM, "num_speculative_tokens": 3, "num_speculative_tokens_cap": 3}


@pytest.mark.parametrize("is_device", [False, True], ids=["cpu", "device"])
@pytest.mark.parametrize("changes", [{}, {"async_scheduling": True}, DRAFTS], ids=["plain", "overlapped", "drafts"])
def test_ended_requests_are_collected(model_of: Callable[..., Path], changes: dict[str, Any], is_device: bool) -> None:
    with steps_of_a_device() if is_device else nullcontext():
        engine = engine_builders.an_engine(model_of(), num_gpu_blocks_override=64, max_model_len=96, **changes)
        for number in range(NUM_REQUESTS):
            sampling = Sampling(max_tokens=6, ignore_eos=True, **KINDS[number % len(KINDS)])
            request = AddRequest(
                f"ended-{number}", [(number * 7 + n) % 97 for n in range(20)], sampling, arrival_time=0.0
            )
            if number % 10 == 9:
                engine.add(request)
                engine.step()
                engine.abort([request.request_id])
            else:
                serve(engine, [request])
        gc.collect()
        kept = [
            each.request_id
            for each in gc.get_objects()
            if type(each) is Request and each.request_id.startswith("ended-")
        ]
        assert len(kept) <= 4, kept
        engine.close()
