"""Triton reads this when it is imported, so it is set before any test module is: kernels then run in its interpreter,
on CPU tensors. Compilation has its own processes (tests/kernels/kernel_benchmarks/aot). `make test-gpu` sets 0: kernels then run on the
GPU.

No test is left to luck: dice begin at the same number for the same test, whatever ran before it in its process, and
properties are tried on the same examples each time, however slow the machine is. Other examples come from
`--lives N` (state machines) and `--hypothesis-profile default` (properties).
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
if importlib.util.find_spec("hypothesis") is not None:  # `make test-gpu` does without it where it is missing
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lives", type=int, help="so many random lives of each state machine, instead of its own number")
    parser.addoption("--worlds", type=int, help="so many random worlds for the operator, instead of the first 2,000")
    parser.addoption("--all", action="store_true", help="more of the same too: what is marked soak, for `make soak`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is marked soak runs only with --all. With --lives, state machines get their number of lives from there, and
    as long as they need."""
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
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
def signals_stay_as_they_were() -> Iterator[None]:
    """Commands say what a signal does to their process. Here that process is everyone's."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def worlds(request: pytest.FixtureRequest) -> int:
    """How many random worlds the operator's tests try; rarer kinds have a part of that. `make soak` asks for 10,000."""
    wanted: int | None = request.config.getoption("--worlds")
    return 2000 if wanted is None else wanted


@pytest.fixture(autouse=True)
def logs_stay_as_they_were() -> Iterator[None]:
    """Commands and live changes say how much is logged, and where."""
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
    """Before the fixtures, which throw dice too."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:  # not for tests that have nothing to do with it
        torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


@pytest.fixture
def nothing_else_to_collect() -> Iterator[None]:
    """For a test that measures its own processor time: garbage collection looks at nothing that was there before."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def device_outlives_the_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """CUDA's errors come late: here, with the test that made them. Some take the process's device for good; under
    pytest-xdist a new process then runs the tests behind, else all of them would fail."""
    yield
    import torch  # not for tests that have nothing to do with it

    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            print(f"{request.node.nodeid}: the device is lost: {error}", file=sys.__stderr__, flush=True)
            os._exit(1)
        raise
