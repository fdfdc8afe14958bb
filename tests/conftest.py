"""Settings for all tests.

TRITON_INTERPRET is set before any test module imports Triton, so that kernels run in its interpreter on CPU tensors.
Tests that compile kernels start their own processes (tests/kernels/kernel_benchmarks/aot). `make test-gpu` sets it to
0: kernels then run on the GPU.

Tests are deterministic: the random seed depends only on the test's name, and property tests use the same examples each
time, however slow the machine is. Other examples come from `--lives N` (state machines) and
`--hypothesis-profile default` (properties).
"""

import gc
import importlib.util
import logging
import os
import random
import signal
import sys
import zlib
from collections.abc import Iterator

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")
if importlib.util.find_spec("hypothesis") is not None:  # optional for `make test-gpu`
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lives", type=int, help="number of random runs of each state machine, instead of its default")
    parser.addoption(
        "--worlds", type=int, help="number of randomized cluster states for operator tests (default: 2,000)"
    )
    parser.addoption("--all", action="store_true", help="also run tests marked soak, for `make soak`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked soak unless --all is set. With --lives, set the runs of state machines and no timeout."""
    if not config.getoption("--all"):
        deselected = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in set(deselected)]
    lives: int | None = config.getoption("--lives")
    if lives is None:
        return
    from hypothesis import settings

    for item in items:
        machine = getattr(item, "cls", None)
        if machine is not None and isinstance(getattr(machine, "settings", None), settings):
            machine.settings = settings(machine.settings, max_examples=lives, derandomize=False)
            item.add_marker(pytest.mark.timeout(0))


@pytest.fixture(autouse=True)
def restore_signal_handlers() -> Iterator[None]:
    """Restore signal handlers that commands install, since all tests share this process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def worlds(request: pytest.FixtureRequest) -> int:
    """Return the number of randomized cluster states per property test; rare kinds use a fraction of it."""
    wanted: int | None = request.config.getoption("--worlds")
    return 2000 if wanted is None else wanted


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """Restore log levels and handlers that commands and live parameters change."""
    logging.getLogger("trimtab_engine")
    loggers = [
        logging.root,
        *(one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)),
    ]
    levels, handlers = [logger.level for logger in loggers], list(logging.root.handlers)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        if logger.level != level:
            logger.setLevel(level)
    for handler in list(logging.root.handlers):
        if handler not in handlers and not type(handler).__module__.startswith("_pytest."):
            logging.root.removeHandler(handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed random number generators before fixtures use them."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:  # only if a test has imported it
        torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


@pytest.fixture
def frozen_gc() -> Iterator[None]:
    """Exclude existing objects from garbage collection, for tests that measure their CPU time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def report_device_errors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Synchronize, so that asynchronous CUDA errors fail the test that caused them.

    Some errors make the process's device unusable; with pytest-xdist a new process then runs the remaining tests.
    """
    yield
    import torch  # only if a test has imported it

    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            print(f"{request.node.nodeid}: the device is lost: {error}", file=sys.__stderr__, flush=True)
            os._exit(1)
        raise
