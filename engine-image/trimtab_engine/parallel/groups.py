"""Process groups of ranks: collectives over torch.distributed, with counts of the bytes sent.

gloo on the CPU, NCCL on CUDA; a group whose backend knows only host memory stages a device's tensors through it. Such
a group cannot be part of a CUDA graph; NCCL's can, except for point-to-point transfers (ADR-0014).

The counts are the bytes that a rank sends in a ring algorithm, independent of the backend's own one, for n ranks with
s bytes each; one-way transfers count at both ends:

all_reduce 2 s (n-1)/n · all_gather s (n-1) · reduce_scatter s (n-1)/n of the whole s · point to point s · gather s,
on the rank that gathers s (n-1) · broadcast s (n-1), on the sender
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

# Into one tensor, without the copies that lists of tensors cost. The second names are torch's up to 2.12.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

CONNECT_SIZES = (1, 1 << 20)  # floats, about: NCCL sends few and many in different ways, with buffers for each


@dataclass(slots=True)
class WireMeter:
    """Bytes on this rank's wire, by kind of collective."""

    sent_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, num_bytes: int) -> None:
        self.sent_bytes[kind] = self.sent_bytes.get(kind, 0) + num_bytes

    def take(self) -> dict[str, int]:
        """Return the bytes counted since the last call."""
        sent, self.sent_bytes = self.sent_bytes, {}
        return sent

    def add_all(self, sent: dict[str, int]) -> None:
        for kind, num_bytes in sent.items():
            self.add(kind, num_bytes)

    @contextmanager
    def apart(self) -> Iterator[dict[str, int]]:
        """Count the bytes of the block in the yielded dictionary instead."""
        before = self.take()
        inside: dict[str, int] = {}
        try:
            yield inside
        finally:
            inside |= self.take()
            self.add_all(before)


class RankGroup:
    """One process group from one rank's view. `ranks` are global; `index` is this rank's index among them."""

    def __init__(self, group: dist.ProcessGroup, ranks: tuple[int, ...], rank: int, meter: WireMeter) -> None:
        self._group, self._ranks, self._meter = group, ranks, meter
        self.size, self.index = len(ranks), ranks.index(rank)
        self._stages_on_host = dist.get_backend(group) == "gloo"

    def stages(self, device: torch.device) -> bool:
        """Return True if tensors of this device are sent through host memory, which the host waits for."""
        return self._stages_on_host and device.type != "cpu"

    @property
    def device(self) -> str:
        """Best device for tensors to send."""
        return "cpu" if self._stages_on_host else "cuda"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks in place and return x."""
        self._meter.add("all_reduce", 2 * x.nbytes * (self.size - 1) // self.size)
        wire = self._to_wire(x)
        dist.all_reduce(wire, group=self._group)
        return x if wire is x else x.copy_(wire)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gather [rows, ...] of each rank to [size * rows, ...] in rank order. Shapes are equal."""
        self._meter.add("all_gather", x.nbytes * (self.size - 1))
        wire = self._to_wire(x)
        whole = wire.new_empty(self.size * x.shape[0], *x.shape[1:])
        _all_gather(whole, wire, group=self._group)
        return whole.to(x.device)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Sum [size * rows, ...] over the ranks and return this rank's rows, [rows, ...]."""
        self._meter.add("reduce_scatter", x.nbytes * (self.size - 1) // self.size)
        wire = self._to_wire(x)
        own = wire.new_empty(x.shape[0] // self.size, *x.shape[1:])
        _reduce_scatter(own, wire, group=self._group)
        return own.to(x.device)

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        """Gather [rows, columns] of each rank to [rows, size * columns] on the first rank; None on the others."""
        wire = self._to_wire(x)
        if self.index:
            self._meter.add("gather", x.nbytes)
            dist.gather(wire, None, self._ranks[0], group=self._group)
            return None
        self._meter.add("gather", x.nbytes * (self.size - 1))
        parts = [torch.empty_like(wire) for _ in self._ranks]
        dist.gather(wire, parts, self._ranks[0], group=self._group)
        return torch.cat(parts, dim=1).to(x.device)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Broadcast the first rank's tensor in place and return it."""
        self._meter.add("broadcast", 0 if self.index else x.nbytes * (self.size - 1))
        wire = self._to_wire(x)
        dist.broadcast(wire, self._ranks[0], group=self._group)
        return x if wire is x else x.copy_(wire)

    def send(self, x: torch.Tensor, index: int) -> None:
        """Send to the rank at this index of the group."""
        self._meter.add("point_to_point", x.nbytes)
        dist.send(self._to_wire(x), self._ranks[index], group=self._group)

    def receive(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Receive into x from the rank at this index of the group."""
        self._meter.add("point_to_point", x.nbytes)
        wire = torch.empty_like(x, device="cpu") if self._stages_on_host and x.device.type != "cpu" else x
        dist.recv(wire, self._ranks[index], group=self._group)
        return x if wire is x else x.copy_(wire)

    def exchange(self, outgoing: dict[int, torch.Tensor], sizes: dict[int, tuple[int, int]]) -> dict[int, torch.Tensor]:
        """Exchange bytes with other ranks of the group at the same time. `sizes`: bytes to receive by sender. Both
        sides must name each other.
        """
        incoming = {index: torch.empty(size, dtype=torch.uint8, device=self.device) for index, size in sizes.items()}
        work = [
            dist.P2POp(dist.isend, self._to_wire(x), self._ranks[index], self._group) for index, x in outgoing.items()
        ]
        work += [dist.P2POp(dist.irecv, x, self._ranks[index], self._group) for index, x in incoming.items()]
        for request in dist.batch_isend_irecv(work) if work else []:
            request.wait()
        self._meter.add("expert_weights", sum(x.nbytes for x in (*outgoing.values(), *incoming.values())))
        return incoming

    def _to_wire(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        return x.cpu() if self._stages_on_host else x


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """The groups of one rank. None where it would be the only member."""

    tensor: RankGroup | None = None
    pipeline: RankGroup | None = None
    data: RankGroup | None = None
    """Ranks with the same heads in other data-parallel copies; only where a mixture of experts spans them."""
    expert: RankGroup | None = None
    """Ranks that share whole experts: all data x tensor ranks of a stage, with expert parallelism."""
    lockstep: RankGroup | None = None
    """The ranks of `data` through host memory: cores agree before a step without waiting for a device."""
    meter: WireMeter = field(default_factory=WireMeter)
    """Counts for all of them."""

    def can_capture(self, device: torch.device) -> bool:
        """Return True if a step's collectives can be part of a CUDA graph. Transfers between pipeline
        stages never are.
        """
        return not any(group is not None and group.stages(device) for group in (self.tensor, self.data))

    def connect(self, device: torch.device) -> None:
        """Use every connection that a step may use, so that none is opened, and takes memory, later, in particular
        during graph capture. All ranks call this at the same time.
        """
        sizes = (1,) if device.type == "cpu" else CONNECT_SIZES
        for group, size in product((self.tensor, self.data, self.expert), sizes):
            if group is not None and not group.stages(device):
                x = torch.zeros(group.size, -(-size // group.size), device=device)
                group.all_reduce(x)
                group.all_gather(x)
                group.reduce_scatter(x)
                group.broadcast(x)
                group.gather_columns(x)
        line = self.pipeline
        if line is not None and not line.stages(device):
            x = torch.zeros(1, device=device)
            if line.index:
                line.receive(x, line.index - 1)
            if line.index + 1 < line.size:
                line.send(x, line.index + 1)
        self.meter.take()


SINGLE_RANK = RankGroups()
