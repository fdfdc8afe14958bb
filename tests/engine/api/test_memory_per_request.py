"""Memory of one request: the peak of the API server and of the core grows by at most 64 MiB beyond the text."""

from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
LIMIT_BYTES = 64 * MIB
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = [97] * 100
LONGEST = [97] * 250
MOST_PROMPTS = 8  # with n = 128 the maximum number of choices
REPORTED: dict[str, Any] = {"prompt": "ab", "n": 18, "max_tokens": 250, "logprobs": 20}  # 94,500 log-probabilities
SAID = "ab" * 100
SMALL: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "ab", "max_tokens": 2, "logprobs": 2, "prompt_logprobs": 2}),
    (COMPLETIONS, {"prompt": "ab", "max_tokens": 2, "stream": True}),
    (COMPLETIONS + "/render", {"prompt": "ab"}),
    (CHAT, {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}),
    ("/tokenize", {"prompt": "ab"}),
]


def peak_bytes(process: int) -> int:
    """Return the peak resident memory since the last reset()."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def reset(process: int) -> int:
    """Reset the peak. Return the current resident memory."""
    Path(f"/proc/{process}/clear_refs").write_text("5")
    return peak_bytes(process)


def children(process: int) -> list[int]:
    """Return engine cores among the processes that it has started."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(pid) for pid in found if b"trimtab_engine.core.process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.fixture(scope="module")
def warm(server: Any) -> None:
    """Load everything that is loaded once."""
    for path, body in SMALL:
        assert server.http.post(path, json=body).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(COMPLETIONS, REPORTED, id="log-probabilities"),
        pytest.param(COMPLETIONS, {**REPORTED, "stream": True}, id="log-probabilities, streamed"),
        pytest.param(
            CHAT,
            {
                "messages": [{"role": "user", "content": "ab"}],
                "n": 18,
                "max_tokens": 250,
                "logprobs": True,
                "top_logprobs": 20,
            },
            id="log-probabilities of a chat",
        ),
        pytest.param(
            COMPLETIONS, {"prompt": LONGEST, "n": 19, "max_tokens": 1, "prompt_logprobs": 20}, id="of the prompt"
        ),
        pytest.param(
            COMPLETIONS,
            {"prompt": [LONG] * MOST_PROMPTS, "n": 128, "max_tokens": 100, "return_token_ids": True},
            id="a thousand choices with their tokens",
        ),
        pytest.param(
            COMPLETIONS,
            {"prompt": [LONG] * MOST_PROMPTS, "n": 128, "max_tokens": 100, "stream": True, "stream_interval": 100},
            id="a thousand choices, streamed",
        ),
        pytest.param(
            COMPLETIONS,
            {"prompt": [SAID] * MOST_PROMPTS, "n": 128, "max_tokens": 20, "echo": True},
            id="a thousand echoes",
        ),
        pytest.param("/tokenize", {"prompt": "ab" * 8000, "return_token_strs": True}, id="tokens"),
        pytest.param(COMPLETIONS, {"prompt": [[97] * 1_000_000]}, id="a rejected prompt"),
        pytest.param(CHAT, {"messages": [{"role": "user", "content": "a"}] * 100_000}, id="rejected messages"),
        pytest.param(
            COMPLETIONS + "/render",
            {"prompt": [LONGEST] * 1000, "max_tokens": 1, "return_token_ids": True},
            id="a thousand prompts, rendered",
        ),
    ],
)
@pytest.mark.usefixtures("warm")
def test_request_memory_of_server_is_at_most_text_plus_64_mib(server: Any, path: str, body: dict[str, Any]) -> None:
    before = reset(server.process.pid)
    response = server.http.post(path, json=body)
    grown = peak_bytes(server.process.pid) - before
    text = len(response.request.content) + len(response.content)
    print(f"{path} {response.status_code}: {grown / MIB:.1f} MiB, text {text / MIB:.1f} MiB")
    assert grown <= LIMIT_BYTES + text, f"{grown / MIB:.0f} MiB for {text / MIB:.1f} MiB of text"


def test_logprobs_memory_of_core_is_at_most_64_mib(tiny_model: Path, real_engine: Any) -> None:
    flags = ("--max-num-seqs", "32", "--max-num-batched-tokens", "256", "--device-memory-bytes", "4Gi")
    engine = real_engine(tiny_model, tiny_model / "log", *flags)
    try:
        (core,) = children(engine.process.pid)
        body = {"prompt": LONGEST, "n": 1, "max_tokens": 1, "prompt_logprobs": 20}
        assert engine.http.post(COMPLETIONS, json=body).status_code == 200  # one-time allocations
        before = reset(core)
        assert engine.http.post(COMPLETIONS, json={**body, "n": 19}).status_code == 200
        grown = peak_bytes(core) - before
    finally:
        engine.end()
    print(f"core: {grown / MIB:.1f} MiB")
    assert grown <= LIMIT_BYTES
