"""A core without a model that speaks messages/: it echoes the prompt's tokens repeatedly, one per step. A pooled
prompt becomes its length, its first tokens and a third, after as many steps as its last token specifies.

The prompt's first characters (byte-level tokens) control it:
    !eos echo the rest once, then end with finish_reason stop
    !slow echo forever, one step per 10 ms, ignoring max_tokens
    !die exit at once without a message
    !fail end this request with finish_reason error
Admin calls return their arguments, and the running and aborted requests.
"""

import array
import json
import os
import sys
import time
from typing import Any

import msgspec
from trimtab_engine.config.pooling import Pooler, Tasks
from trimtab_engine.core.clients import Clients
from trimtab_engine.ipc.parent_death import exit_with_parent
from trimtab_engine.messages.admin import AdminCall, AdminReply, EngineState, PauseMode
from trimtab_engine.messages.lifecycle import ClientAddresses, CoreFailed, CoreReady, LoadProgress, Shutdown
from trimtab_engine.messages.requests import (
    AbortRequests,
    AddRequest,
    PlainTokens,
    SequenceOutput,
    StepOutputs,
    StepStats,
)
from trimtab_engine.scheduling.pooling import Pooling
from trimtab_engine.scheduling.sampling import PackedLogprobs, TokenLogprobs

MAX_MODEL_LEN = 256
VOCAB_SIZE = 258
END_TOKEN = 256
STEP_MILLISECONDS = int(os.environ.get("STUB_STEP_MILLISECONDS", "10"))
IDLE_MILLISECONDS = 100  # messages are received at once meanwhile
HIDDEN_SIZE = 6
NO_TASKS = {555: {"no_pooling": "set by the stub"}, 556: {"no_generation": "set by the stub"}}
"""By seeds of cores that only support one task."""
STATE_FIELDS = ("max_num_seqs", "max_num_queued_reqs", "max_num_queued_tokens", "disable_log_stats")
PAUSED: dict[int, PauseMode] = {888: "wait", 889: "keep"}  # seeds of cores that are paused from the start
COMMANDS = ("!eos", "!slow", "!die", "!fail")


class Sequence:
    def __init__(self, message: AddRequest) -> None:
        self.message = message
        text = bytes(token for token in message.prompt_token_ids if token < END_TOKEN)
        self.command = next((c for c in COMMANDS if text.startswith(c.encode())), "")
        self.echo = message.prompt_token_ids[len(self.command) :]
        self.num_sent = 0

    def step(self) -> SequenceOutput:
        sampling = self.message.sampling
        if self.command == "!die":
            os._exit(9)
        if self.command == "!fail":
            return SequenceOutput(self.message.request_id, [], "error")
        if self.message.pooling is not None:
            return self.pool(self.message.pooling)
        ends = self.command == "!eos" and self.num_sent == len(self.echo)
        token = END_TOKEN if ends else self.echo[self.num_sent % len(self.echo)]
        self.num_sent += 1
        output = SequenceOutput(self.message.request_id, [token])
        if self.num_sent == 1:
            output.first_scheduled_time = self.message.arrival_time
            output.num_cached_tokens = len(self.message.prompt_token_ids) - 1
            if sampling.prompt_logprobs is not None:
                likely = list(range(sampling.prompt_logprobs))
                values = [-0.25, *(-1.0 - i for i in likely)]
                known = self.message.prompt_token_ids[1:]
                output.prompt_logprobs = PackedLogprobs.of(
                    TokenLogprobs([token_id, *likely], values, 1) for token_id in known
                )
        if sampling.logprobs is not None:
            others = list(range(sampling.logprobs))
            output.logprobs = [TokenLogprobs([token, *others], [-0.5, *(-1.0 - i for i in others)], 1)]
        if ends or (token in sampling.stop_token_ids and self.num_sent > sampling.min_tokens):
            output.finish_reason = "stop"
            output.stop_token_id = None if ends else token
        elif self.num_sent >= sampling.max_tokens and self.command != "!slow":
            output.finish_reason = "length"
        return output

    def pool(self, pooling: Pooling) -> SequenceOutput:
        """Return the only output, delayed by the last token."""
        tokens = self.message.prompt_token_ids
        self.num_sent += 1
        output = SequenceOutput(self.message.request_id, [])
        if self.command == "!slow" or self.num_sent < tokens[-1] % 10:
            return output
        values = [len(tokens), *tokens[: HIDDEN_SIZE - 2], *[0] * (HIDDEN_SIZE - 2 - len(tokens)), 1 / 3]
        output.pooled = array.array(
            "f", [*values[: pooling.dimensions or HIDDEN_SIZE], *[9.0] * pooling.normalize]
        ).tobytes()
        output.finish_reason = "stop"
        output.first_scheduled_time = self.message.arrival_time
        output.num_cached_tokens = len(tokens) - 1
        return output


def state_of(config: dict[str, Any], num_requests: int) -> EngineState:
    """Return the state of a core that runs all its requests but reports those beyond max_num_seqs as waiting."""
    num_running = min(num_requests, config["max_num_seqs"])
    return EngineState(
        num_running=num_running,
        num_waiting=num_requests - num_running,
        **{name: config[name] for name in STATE_FIELDS},
        pause_mode=PAUSED.get(config["seed"]),
    )


def main() -> None:
    exit_with_parent()  # like the real core: never outlives its server
    start = json.loads(sys.stdin.readline())
    link = Clients([ClientAddresses(**client) for client in start["clients"]])
    link.broadcast(LoadProgress("weights", 40.0))
    if start["config"]["seed"] == 666:  # a failing start
        link.broadcast(CoreFailed("failure set by the stub; use another seed", 2))
        link.close()
        return
    while start["config"]["seed"] == 777 and os.getppid() > 1:  # a load that never ends
        time.sleep(0.1)
    pooler = Pooler("last", normalize=False, dimensions=None, hidden_size=HIDDEN_SIZE)
    tasks = Tasks(pooler, **NO_TASKS.get(start["config"]["seed"], {}))
    cache = {"block_size": "16", "num_gpu_blocks": "100"}
    link.broadcast(CoreReady(MAX_MODEL_LEN, VOCAB_SIZE, [END_TOKEN], 16, 100, cache, tasks=tasks))
    running: dict[str, Sequence] = {}
    aborted: list[str] = []
    seen: list[dict[str, object]] = []
    added: list[dict[str, object]] = []
    step = 0
    last: list[str] = []
    last_state, last_state_at = EngineState(), 0.0
    while True:
        now = state_of(start["config"], len(running))
        if now != last_state or time.monotonic() - last_state_at > 1.0:  # heartbeat, like the real core
            last_state, last_state_at = now, time.monotonic()
            link.broadcast(last_state)
        for received in link.receive(STEP_MILLISECONDS if running else IDLE_MILLISECONDS):
            match received:
                case AddRequest() as message:
                    running[message.request_id] = Sequence(message)
                    seen.append(msgspec.to_builtins(message.sampling))
                    added.append({"cache_salt": message.cache_salt, "priority": message.priority})
                case AbortRequests(ids):
                    aborted += [key for key in ids if running.pop(key, None)]
                case AdminCall(call_id, call, client):
                    body = msgspec.to_builtins(call)
                    method = body.pop("type")
                    state: dict[str, Any] = {
                        "method": method,
                        "body": body,
                        "running": len(running),
                        "aborted": len(aborted),
                    }
                    state |= {"is_paused": True, "is_sleeping": True}  # immediately
                    refused = method == "config_patch" and body["values"] == {"a": 1}
                    link.send(
                        AdminReply(call_id, 422 if refused else 200, {**state, "seen": seen, "added": added}), client
                    )
                case Shutdown():
                    return
        outputs = [sequence.step() for sequence in running.values()]
        step += bool(outputs)
        outputs = [output for output in outputs if output.token_ids or output.finish_reason]
        for output in outputs:
            if output.finish_reason is not None:
                del running[output.request_id]
        kind = "decode" if outputs else "idle"
        stats = StepStats(step, time.monotonic(), 0.001, kind, len(running), 0, len(running), 100, 100)
        stats.num_scheduled_tokens = stats.num_generation_tokens = sum(len(o.token_ids) for o in outputs)
        stats.preempted = {"recompute": {"capacity": 1}} if step == 1 and outputs else {}
        stats.memory_bytes, stats.config_values = {"weights": 7}, {"max_num_seqs": 128.0}
        plain = [output for output in outputs if goes_on(output)]
        others = [output for output in outputs if not goes_on(output)]
        ids = [output.request_id for output in plain]
        last = ids if ids != last else last  # the identical list marks unchanged requests
        columns = PlainTokens([output.token_ids[0] for output in plain], last) if last else None
        link.send_step(StepOutputs(others, stats, columns))


def goes_on(output: SequenceOutput) -> bool:
    """Return True if the output only has its token."""
    return output == SequenceOutput(output.request_id, output.token_ids[:1]) and len(output.token_ids) == 1


if __name__ == "__main__":
    main()
