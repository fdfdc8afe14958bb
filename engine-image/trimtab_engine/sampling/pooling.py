"""Pooling of hidden states after the last norm to one vector per prompt: summed on the device, finished on the host.

```
device   rows of the step's hidden states ──> one row per sequence that pools: the last token's, or the sum of a chunk's
host     sums of chunks, added up as they land ──> divided by their number, cut, divided by the length
```
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trimtab_engine.device.transfer import Mark, receive, send
from trimtab_engine.scheduling.pooling import Pooling
from trimtab_engine.scheduling.request import Request

Array = np.ndarray[Any, np.dtype[np.float32]]
TokensOfRequest = tuple[Request, int, int]
"""(request, position, count): tokens whose hidden states a step has summed, starting at that position."""
LEAST_LENGTH = 1e-12  # minimum divisor of a vector's norm, as in torch's normalize


@dataclass(frozen=True, slots=True)
class PooledInFlight:
    """One row per pooled sequence, being copied to the host. `places`: request of each row of `rows` [sequences,
    hidden_size] float32.
    """

    rows: torch.Tensor
    places: Sequence[int]
    arrived: Mark

    def result(self) -> Array:
        """Wait for the rows: [sequences, hidden_size] float32, in request order."""
        self.arrived.wait()
        rows: Array = self.rows.numpy()
        return rows[list(self.places)]


def pool(
    hidden: torch.Tensor,
    pooled: Sequence[tuple[int, int]],
    normalised: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> PooledInFlight:
    """Start to sum rows [first, first + count) of hidden [rows, hidden_size] for each of `pooled`, and to copy the sums
    to the host, without waiting. `normalised`: applies the last norm to some rows.
    """
    alone = [place for place, (_, count) in enumerate(pooled) if count == 1]
    chunks = [place for place, (_, count) in enumerate(pooled) if count > 1]
    parts: list[torch.Tensor] = []
    if alone:
        index = torch.tensor([pooled[place][0] for place in alone], dtype=torch.int64)
        parts.append(normalised(hidden, send(index, hidden.device)).float())
    for place in chunks:
        first, count = pooled[place]
        index = torch.arange(first, first + count, device=hidden.device)
        parts.append(normalised(hidden, index).sum(dim=0, keepdim=True, dtype=torch.float32))
    order = np.argsort([*alone, *chunks]).tolist()
    in_flight = PooledInFlight(receive(torch.cat(parts)), order, Mark(hidden.device))
    in_flight.arrived.set()
    return in_flight


def is_finite(row: Array) -> bool:
    """Return True if the vector has no NaN or infinity."""
    return bool(np.isfinite(row).all())


def add_up(tokens: TokensOfRequest, row: Array) -> None:
    """Add the sum of the hidden states of `tokens`, which arrive in order. A recomputation from the beginning restarts
    the sum.
    """
    request, position, count = tokens
    assert request.pooling is not None
    if request.pooling.needs_all_tokens and position:
        if position != request.num_summed_tokens:
            return  # of a life that a preemption has ended
        row = row + np.frombuffer(request.hidden_sum, np.float32)
        count += request.num_summed_tokens
    request.hidden_sum, request.num_summed_tokens = row.astype(np.float32).tobytes(), count


def finished(hidden_sum: bytes, num_tokens: int, pooling: Pooling) -> bytes:
    """Return the vector, little-endian float32, of the sum of this number of hidden states."""
    vector = np.frombuffer(hidden_sum, np.float32).astype(np.float64) / num_tokens
    if pooling.dimensions is not None:
        vector = vector[: pooling.dimensions]
    if pooling.normalize:
        vector = vector / max(float(np.linalg.norm(vector)), LEAST_LENGTH)
    return vector.astype("<f4").tobytes()
