"""Steps of a device on the CPU: a recorder for machines without CUDA, which replays by calling the recorded function
again, on the same tensors and with the same calls outside, so that everything runs as on CUDA but for CUDA's own
recording. It is a test double and on no path that serves.

As a program, `calling_recorder.py worker|core FOLDER`, it is a rank or an engine core with such steps, whose ranks have
them too; every process notes in a file of FOLDER which graph each of its steps took.
"""

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from trimtab_engine.core import process
from trimtab_engine.core.engine import Engine
from trimtab_engine.engine_client import started_core
from trimtab_engine.executor import worker, workers
from trimtab_engine.runner import adapters, start
from trimtab_engine.runner.graphs.dispatcher import Dispatcher, Eager
from trimtab_engine.runner.graphs.plan import GraphKey, cuda_graph_plan
from trimtab_engine.runner.graphs.recorder import Outside, Replay
from trimtab_engine.scheduling.step_inputs import StepShape

Result = TypeVar("Result")


class CallingRecorder:
    """Counts recordings and replays. As strict as torch: a pool that has lost all its graphs accepts no others."""

    def __init__(self) -> None:
        self.num_records = 0
        self.num_replays = 0
        self.is_recording = False
        self.forget()

    def forget(self) -> None:
        self._pool, self._is_used = weakref.WeakSet[Replay](), False

    def record(self, run: Callable[[Outside], None]) -> Replay:
        assert self._pool or not self._is_used, "torch's assertion, use_count > 0, fails here"
        self._is_used = True
        self.num_records += 1
        self._call(run)

        def replay() -> None:
            self.num_replays += 1
            self._call(run)

        self._pool.add(replay)
        return replay

    def _call(self, run: Callable[[Outside], None]) -> None:
        self.is_recording = True
        run(self._outside)
        self.is_recording = False

    def _outside(self, call: Callable[[], None]) -> None:
        self.is_recording = False
        call()
        self.is_recording = True


@contextmanager
def steps_of_a_device(notes: Path | None = None) -> Iterator[CallingRecorder]:
    """Engines that start inside have a device's steps, with this recorder; so do their ranks, and the cores that are
    started as processes, where `notes` is a folder.
    """
    recorder = CallingRecorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "recorder_of", lambda device: recorder)
        patch.setattr(start, "graph_plan", cuda_graph_plan)
        patch.setattr(adapters, "reads_slots", lambda device: True)
        if notes is not None:
            patch.setattr(workers, "WORKER_COMMAND", (sys.executable, __file__, "worker", str(notes)))
            patch.setattr(started_core, "CORE_COMMAND", (sys.executable, __file__, "core", str(notes)))
            patch.setattr(Dispatcher, "dispatch", noting(Dispatcher.dispatch, notes))
        yield recorder


def steps_that_follow(engine: Engine, run: Callable[[], Result]) -> tuple[list[bool], Result]:
    """Return for each overlapped step whether it started before the previous one completed, and the result of `run`."""
    followed: list[bool] = []
    follow = engine._dispatch_follower

    def note(step: Any, flight: Any) -> Any:
        follower = follow(step, flight)
        if step is not None:
            followed.append(follower is not None)
        return follower

    engine._dispatch_follower = note  # type: ignore[method-assign, assignment]  # the decision is what is asked about
    result = run()
    assert followed
    return followed, result


def all_steps_follow(engine: Engine, run: Callable[[], Result]) -> Result:
    followed, result = steps_that_follow(engine, run)
    assert all(followed)
    return result


def noting(dispatch: Callable[[Dispatcher, StepShape], GraphKey | Eager], folder: Path) -> Any:
    """The same, with a line for each step in this process's file."""

    def dispatch_and_note(dispatcher: Dispatcher, shape: StepShape) -> GraphKey | Eager:
        choice = dispatch(dispatcher, shape)
        with (folder / str(os.getpid())).open("a") as file:
            file.write(f"{choice}\n")
        return choice

    return dispatch_and_note


def noted(folder: Path) -> list[list[str]]:
    """Return the notes of each process that ran steps."""
    return [path.read_text().splitlines() for path in sorted(folder.iterdir())]


if __name__ == "__main__":
    with steps_of_a_device(Path(sys.argv[2])):
        code = worker.main() if sys.argv[1] == "worker" else process.main()
    os._exit(code)
