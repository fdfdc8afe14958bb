"""Stub core that computes nothing, for measuring API servers: a step of 2 ms returns a token for every request.

It runs on the CPU named by STUB_CPU (the client's), so that the servers' CPU is not shared.
"""

import os
import sys
import time

import msgspec
from trimtab_engine.core.clients import Clients
from trimtab_engine.messages.admin import AdminCall, AdminReply
from trimtab_engine.messages.lifecycle import CoreReady, CoreStart, Shutdown
from trimtab_engine.messages.requests import AddRequest, PlainTokens, SequenceOutput, StepOutputs, StepStats

CPU_VARIABLE = "STUB_CPU"
MAX_MODEL_LEN = 8192
VOCAB_SIZE = 1 << 20
WAIT_MILLISECONDS = 1000
FIRST_TOKEN_ID = 1000  # ordinary tokens of any vocabulary
NUM_TOKEN_IDS = 1000
STEP_SECONDS = 0.002  # so that a step returns a token for all streams, as an engine's does


def main() -> None:
    start = msgspec.json.decode(sys.stdin.readline(), type=CoreStart)
    link = Clients(start.clients)
    link.broadcast(CoreReady(MAX_MODEL_LEN, VOCAB_SIZE, [], 16, 1 << 16, {"block_size": "16"}))
    left: dict[str, int] = {}
    begun: set[str] = set()
    last: list[str] = []
    step = 0
    while True:
        for message in link.receive(0 if left else WAIT_MILLISECONDS):
            match message:
                case AddRequest():
                    left[message.request_id] = message.sampling.max_tokens
                case AdminCall():
                    link.send(AdminReply(message.call_id, 200, {}), message.client_index)
                case Shutdown():
                    return
        time.sleep(STEP_SECONDS if left else 0.0)
        step += 1
        outputs, plain = [], []
        token_id = FIRST_TOKEN_ID + step % NUM_TOKEN_IDS
        for request_id in list(left):
            left[request_id] -= 1
            ended = left[request_id] == 0
            if request_id in begun and not ended:
                plain.append(request_id)
                continue
            begun.add(request_id)
            output = SequenceOutput(request_id, [token_id], "length" if ended else None)
            output.first_scheduled_time = time.monotonic()
            outputs.append(output)
            if ended:
                del left[request_id]
                begun.discard(request_id)
        last = plain if plain != last else last  # the same list object signals that nothing changed
        kind = "decode" if outputs or plain else "idle"
        stats = StepStats(step, time.monotonic(), 0.001, kind, len(left), 0, 0, 1 << 16, 1 << 16)
        stats.num_generation_tokens = stats.num_scheduled_tokens = len(outputs) + len(plain)
        columns = PlainTokens([token_id] * len(last), last) if last else None
        link.send_step(StepOutputs(outputs, stats, columns))


if __name__ == "__main__":
    if CPU_VARIABLE in os.environ:
        os.sched_setaffinity(0, {int(os.environ[CPU_VARIABLE])})
    main()
