"""Runs a Gluon kernel's source as plain Python, because Gluon has no interpreter: its functions are rebuilt with
stand-ins for the language's names.

Modelled:

- partitions run one at a time, and a seed selects the next one at every barrier, copy and matrix instruction;
- a copy by the tensor memory accelerator completes some time after it was issued, and its target contains NaN until
then; the part outside of the tensor becomes zeros;
- an asynchronous matrix instruction reads shared memory some time between its issue and the wait for it;
- barriers count arrivals and bytes, and have phases; too many arrivals and a wait that never ends are errors;
- a matrix instruction that reads data stored by threads without a fence is an error, and so is a division of a negative
number, which Python rounds down and Gluon towards zero.

Not modelled: layouts, registers, warps within a partition, the order of memory between threads, and the compiler. A
kernel that passes has correct arithmetic and masks, and a protocol without races and deadlocks; only a device shows
whether its machine code does the same.
"""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch


class GluonError(Exception):
    """An operation that a device would execute wrongly, hang at, or report as an error."""


class Value(torch.Tensor):
    """A tensor or number of a kernel."""

    def __floordiv__(self, other: Any) -> Any:
        _not_negative(self)
        return torch.Tensor.__floordiv__(self, other)

    @property
    def type(self) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(layout=None)

    def __mod__(self, other: Any) -> Any:
        _not_negative(self)
        return torch.Tensor.__mod__(self, other)


def _not_negative(value: torch.Tensor) -> None:
    if bool((value.as_subclass(torch.Tensor) < 0).any()):
        raise GluonError("a negative number is divided: Python rounds it down, Gluon towards zero")


def value(of: Any) -> Value:
    """Return the value as kernels see it."""
    return torch.as_tensor(of).as_subclass(Value)


@dataclass(frozen=True)
class Pointer:
    """Addresses in a tensor's memory."""

    memory: torch.Tensor
    offsets: Any = 0

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.memory, self.offsets + more)

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def places(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (offsets, whether each is accessed).

        Raises:
            GluonError: an accessed address is outside of the tensor.
        """
        offsets = torch.as_tensor(self.offsets).as_subclass(torch.Tensor)
        wanted = torch.as_tensor(True if mask is None else mask).as_subclass(torch.Tensor)
        shape = torch.broadcast_shapes(offsets.shape, wanted.shape)  # type: ignore[no-untyped-call]
        offsets, wanted = offsets.expand(shape), wanted.expand(shape)
        if bool((wanted & ((offsets < 0) | (offsets >= self.memory.numel()))).any()):
            raise GluonError("memory outside of a tensor is accessed")
        return offsets, wanted


def pointer(tensor: torch.Tensor) -> Pointer:
    """Return a pointer to a tensor's first element; the caller passes the strides, as at a launch."""
    return Pointer(tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0))


@dataclass(frozen=True)
class Box:
    """A tensor descriptor: boxes of this shape are copied out of the tensor."""

    tensor: torch.Tensor
    block_shape: Sequence[int]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, corner: Sequence[Any]) -> torch.Tensor:
        """Read a box; zeros outside of the tensor."""
        result = torch.zeros(tuple(self.block_shape), dtype=self.dtype)
        starts = [int(place) for place in corner]
        inner, outer = [], []
        for start, length, size in zip(starts, self.block_shape, self.tensor.shape, strict=True):
            first, last = max(0, start), min(size, start + length)
            if first >= last:
                return result
            outer.append(slice(first, last))
            inner.append(slice(first - start, last - start))
        result[tuple(inner)] = self.tensor[tuple(outer)]
        return result


@dataclass
class Shared:
    """Shared memory or a view of it. `unfenced` names partitions whose stores may not yet be visible to other units."""

    content: torch.Tensor
    unfenced: set[str] = field(default_factory=set)
    parts: "dict[int, Shared]" = field(default_factory=dict)

    @property
    def shape(self) -> list[int]:
        return list(self.content.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.content.dtype

    def index(self, place: Any) -> "Shared":
        return self.parts.setdefault(int(place), Shared(self.content[int(place)]))

    def fence(self, partition: str) -> None:
        self.unfenced.discard(partition)
        for part in self.parts.values():
            part.fence(partition)

    def slice(self, start: Any, length: int, dim: int = 0) -> "Shared":
        return Shared(self.content.narrow(dim, int(start), length), self.unfenced)

    def reshape(self, shape: Sequence[int]) -> "Shared":
        return Shared(self.content.view(tuple(shape)), self.unfenced)

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(self.content.permute(tuple(order)), self.unfenced)

    def store(self, new: torch.Tensor) -> None:
        self.content.copy_(new.as_subclass(torch.Tensor))
        self.unfenced.add(threading.current_thread().name)

    def load(self, layout: Any = None) -> Value:
        return value(self.content.clone())


@dataclass
class Barrier:
    """One mbarrier: a phase ends after `count` arrivals and all expected bytes."""

    count: int = 0
    left: int = 0
    bytes_left: int = 0
    phase: int = 0

    def take(self, arrivals: int, more_bytes: int) -> None:
        self.left -= arrivals
        self.bytes_left += more_bytes
        if self.left < 0:
            raise GluonError("more arrivals at a barrier than its phase has")
        self.settle()

    def land(self, landed: int) -> None:
        self.bytes_left -= landed
        self.settle()

    def settle(self) -> None:
        if self.left == 0 and self.bytes_left == 0:
            self.phase ^= 1
            self.left = self.count


@dataclass
class Product:
    """An asynchronous matrix instruction; `result` is set when it has ended."""

    left: Any
    right: Shared
    sums: Any
    keeps_sums: bool
    result: Value | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.left.shape[0], self.right.shape[1]))

    def finish(self) -> None:
        operands = [part.content if isinstance(part, Shared) else part for part in (self.left, self.right)]
        for part in (self.left, self.right):
            if isinstance(part, Shared) and part.unfenced:
                raise GluonError("a matrix instruction reads unfenced stores")
        left, right = (part.as_subclass(torch.Tensor).float() for part in operands)
        new = left @ right
        self.result = value(new + self.sums.as_subclass(torch.Tensor) if self.keeps_sums else new)


class Machine:
    """One CTA. `run` ends when all partitions have ended.

    Raises:
        GluonError: a partition violated the model.
    """

    def __init__(self, program: int, num_programs: int, seed: int) -> None:
        self.program, self.num_programs = program, num_programs
        self.random = random.Random(seed)
        self.copies: list[tuple[str, Callable[[], None]]] = []
        self.paces: dict[str, float] = {}
        self.products: dict[str, list[Product]] = {}
        self.blocked: dict[str, Callable[[], bool]] = {}
        self.batons: dict[str, threading.Semaphore] = {}
        self.back = threading.Semaphore(0)
        self.failure: BaseException | None = None

    # Called by partitions.

    def pause(self, until: Callable[[], bool] = lambda: True) -> None:
        """Let other partitions run; return when the condition holds and this partition is scheduled."""
        name = threading.current_thread().name
        if name not in self.batons:  # before the partitions start
            if not until():
                raise GluonError("a wait without an end, before the partitions start")
            return
        self.blocked[name] = until
        self.back.release()
        self.batons[name].acquire()
        if self.failure is not None:
            raise GluonError("another partition has failed")

    def copy(self, box: Box, corner: Sequence[Any], barrier: Barrier, target: Shared) -> None:
        corner = [int(place) for place in corner]
        target.content.fill_(float("nan"))

        def land() -> None:
            target.content.copy_(box.read(corner).view(target.content.shape))
            barrier.land(target.content.numel() * target.content.itemsize)

        self.copies.append((f"copies of {id(box)}", land))
        self.pause()

    def product(self, new: Product) -> Product:
        self.products.setdefault(threading.current_thread().name, []).append(new)
        self.pause()
        return new

    def wait_products(self, left_under_way: int, deps: Sequence[Any]) -> Any:
        self.pause()
        under_way = self.products.get(threading.current_thread().name, [])
        while len(under_way) > left_under_way:
            under_way.pop(0).finish()
        results = []
        for dependency in deps:
            if isinstance(dependency, Product):
                if dependency.result is None:
                    raise GluonError("the result of a matrix instruction is used before it has ended")
                results.append(dependency.result)
            else:
                results.append(dependency)
        return results[0] if len(results) == 1 else tuple(results)

    # Scheduling.

    def run_partitions(self, functions: Sequence[tuple[Callable[..., None], Sequence[Any]]]) -> None:
        """Run each function in a thread, one at a time."""

        def body(function: Callable[..., None], arguments: Sequence[Any]) -> None:
            name = threading.current_thread().name
            self.batons[name].acquire()
            try:
                if self.failure is None:
                    function(*arguments)
            except BaseException as error:
                self.failure = self.failure or error
            del self.batons[name], self.blocked[name]
            self.back.release()

        threads = []
        for number, (function, arguments) in enumerate(functions):
            name = f"partition {number}"
            self.batons[name], self.blocked[name] = threading.Semaphore(0), lambda: True
            threads.append(threading.Thread(target=body, args=(function, arguments), name=name, daemon=True))
        for thread in threads:
            thread.start()
        while self.batons:
            self._step()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        if self.copies:
            raise GluonError("a CTA ends before its copies have completed")

    def _pace(self, of: str) -> float:
        """Return the weight of a partition: some are slower than others by orders of magnitude, depending on the
        seed.
        """
        return self.paces.setdefault(of, 10 ** self.random.uniform(-3, 0))

    def _step(self) -> None:
        """Run one of the possible next events."""
        ready = [name for name, until in self.blocked.items() if self.failure is not None or until()]
        ending = [name for name, products in self.products.items() if products and name in self.batons]
        choices: list[tuple[str, Any]] = [("run", name) for name in ready]
        choices += [("land", number) for number in range(len(self.copies))]
        choices += [("end", name) for name in ending]
        paces = [self._pace(self.copies[who][0] if what == "land" else f"{what} {who}") for what, who in choices]
        if not ready and not self.copies:
            self.failure = GluonError(f"deadlock: {', '.join(self.blocked)} wait, and nothing is under way")
            return
        what, who = self.random.choices(choices, paces)[0]
        if what == "land":
            self.copies.pop(who)[1]()
        elif what == "end":
            try:
                self.products[who].pop(0).finish()
            except GluonError as error:
                self.failure = error
        else:
            self.batons[who].release()
            self.back.acquire()


def stand_ins(machine: Machine) -> dict[str, Any]:
    """Return the names that kernels import from launch.gluon."""

    def load(place: Pointer, mask: Any = None, other: Any = 0.0) -> Value:
        offsets, wanted = place.places(mask)
        safe = torch.where(wanted, offsets, 0)
        return value(torch.where(wanted, place.memory[safe], torch.as_tensor(other, dtype=place.memory.dtype)))

    def store(place: Pointer, new: torch.Tensor, mask: Any = None) -> None:
        offsets, wanted = place.places(mask)
        new = torch.as_tensor(new).as_subclass(torch.Tensor).expand(offsets.shape)
        place.memory[offsets[wanted]] = new[wanted].to(place.memory.dtype)

    def allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
        if dtype == torch.int64:
            return _Barriers([Barrier() for _ in range(shape[0])])
        return Shared(torch.full(tuple(shape), float("nan"), dtype=dtype))

    def init(barrier: Barrier, count: int) -> None:
        barrier.count = barrier.left = count

    def expect(barrier: Barrier, num_bytes: int) -> None:
        barrier.take(1, num_bytes)
        machine.pause()

    def arrive(barrier: Barrier, count: int = 1) -> None:
        barrier.take(count, 0)
        machine.pause()

    def fence() -> None:
        for shared in allocated:
            shared.fence(threading.current_thread().name)

    allocated: list[Shared] = []

    def allocate_shared(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
        made = allocate(dtype, shape, layout)
        if isinstance(made, Shared):
            allocated.append(made)
        return made

    def multiply(left: Any, right: Shared, sums: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async
        return machine.product(Product(left, right, sums, use_acc))

    def nothing(*arguments: Any, **keywords: Any) -> None:
        return None

    gl = SimpleNamespace(
        constexpr=object,
        float32=torch.float32,
        int32=torch.int32,
        int64=torch.int64,
        static_range=range,
        program_id=lambda axis: value(machine.program),
        num_programs=lambda axis: value(machine.num_programs),
        maximum=lambda a, b: value(torch.maximum(*_both(a, b))),
        minimum=lambda a, b: value(torch.minimum(*_both(a, b))),
        where=lambda condition, a, b: value(torch.where(torch.as_tensor(condition), *_both(a, b))),
        exp2=lambda x: value(torch.exp2(x)),
        max=lambda x, axis: value(x.amax(axis)),
        sum=lambda x, axis: value(x.sum(axis)),
        cdiv=lambda a, b: (a + b - 1) // b,
        arange=lambda first, last, layout=None: value(torch.arange(first, last)),
        zeros=lambda shape, dtype, layout=None: value(torch.zeros(tuple(shape), dtype=dtype)),
        full=lambda shape, fill, dtype, layout=None: value(torch.full(tuple(shape), fill, dtype=dtype)),
        convert_layout=lambda x, layout: x,
        load=load,
        store=store,
        allocate_shared_memory=allocate_shared,
        warp_specialize=lambda functions, warps, registers: machine.run_partitions(functions),
        NVMMADistributedLayout=nothing,
        NVMMASharedLayout=nothing,
        BlockedLayout=nothing,
        SliceLayout=nothing,
        DotOperandLayout=nothing,
    )
    return {
        "gl": gl,
        "hopper": SimpleNamespace(
            fence_async_shared=fence,
            warpgroup_mma=multiply,
            warpgroup_mma_wait=machine.wait_products,
        ),
        "mbarrier": SimpleNamespace(
            MBarrierLayout=nothing,
            init=init,
            expect=expect,
            arrive=arrive,
            wait=lambda barrier, phase: machine.pause(lambda: barrier.phase != int(phase)),
        ),
        "copy_from_descriptor": machine.copy,
        "partition_barrier": machine.pause,
    }


class _Barriers(list[Barrier]):
    def index(self, place: Any) -> Barrier:  # type: ignore[override]
        return self[int(place)]


def _both(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert both to one dtype, as Gluon promotes a number combined with a tensor."""
    left, right = torch.as_tensor(a), torch.as_tensor(b)
    dtype = torch.promote_types(left.dtype, right.dtype)
    if not isinstance(a, torch.Tensor):
        dtype = right.dtype if isinstance(b, torch.Tensor) and right.dtype.is_floating_point else dtype
    if not isinstance(b, torch.Tensor):
        dtype = left.dtype if isinstance(a, torch.Tensor) and left.dtype.is_floating_point else dtype
    return left.to(dtype).as_subclass(torch.Tensor), right.to(dtype).as_subclass(torch.Tensor)


def run_program(
    module: ModuleType, name: str, arguments: dict[str, Any], *, program: int, num_programs: int = 1, seed: int
) -> None:
    """Run one CTA of the module's kernel of this name, with its functions rebuilt.

    Raises:
        GluonError: the kernel violated the model.
    """
    machine = Machine(program, num_programs, seed)
    names = {**vars(module), **stand_ins(machine)}
    for found, function in vars(module).items():
        source = getattr(function, "fn", None) or getattr(getattr(function, "function", None), "fn", None)
        if isinstance(source, FunctionType):
            names[found] = FunctionType(source.__code__, names, found, source.__defaults__, source.__closure__)
    names[name](**arguments)
