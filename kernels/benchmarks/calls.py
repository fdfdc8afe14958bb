"""`python3 -m benchmarks.calls gate|rows|rest`: the three commands of a borrowed GPU's half hour, each ten minutes.

gate    is it right: mapped memory and swap, every kernel, the sanitizer, graphs, layouts
rows    how fast is it: limits, kernels, engine, peers
rest    what was not reached, then the tuner, and the float8 rows again with what it has found

Every step is a process group with a time of its own; one that fails or hangs does not keep the next from running. All
output goes into call-NAME.log from the first second on, and what came of each step into call-NAME.json after it, so
that a machine which is taken away has left what it found. Eight files at most, flat, with plain names: some machines
give back no more.
"""

import argparse
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.machine import what_is_missing
from benchmarks.phase import DONE, FAILED, NO_GPU, OUT_OF_TIME

CALL_SECONDS = 570.0
"""Below the ten minutes that a command may take on machines lent by the half hour."""
LAST_SECONDS = 5.0
"""Kept for the archive and the summary."""
PYTHON = sys.executable
REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {"TRITON_INTERPRET": "0", "PYTHONUNBUFFERED": "1"}
NO_TESTS = 5
"""pytest's exit code where nothing was selected."""
SHAPES = "kernels/benchmarks/shapes"


@dataclass(frozen=True, slots=True)
class Step:
    """One command and the seconds that it may take at most. `needs`: a program that must be there, else the step is
    left out and says so. `ok`: exit codes that are no failure."""

    name: str
    command: tuple[str, ...]
    seconds: float
    needs: str = ""
    ok: tuple[int, ...] = (DONE, NO_TESTS)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a step. `code`: None where it was left out; `said` tells why, or that it was ended."""

    step: str
    command: str
    code: int | None
    seconds: float
    said: str = ""

    @property
    def is_bad(self) -> bool:
        return self.said.startswith("ended") or (self.code is not None and not self.said and self.code != DONE)


def _pytest(*arguments: str, jobs: int = 0) -> tuple[str, ...]:
    """pytest on the device. Options replace pyproject.toml's, which name plug-ins that such a machine may lack."""
    spread = ("-n", str(jobs)) if jobs else ()
    fixed = ("-q", "-o", "addopts=--import-mode=importlib", "-W", "default", "-p", "no:cacheprovider", "-m", "not cpu")
    wheels = (PYTHON, "-m", "benchmarks.wheels", "build/wheels", "pytest")
    return (*wheels, *fixed, *spread, "--durations=5", *arguments)


def steps_of(call: str, output: Path, *, jobs: int) -> list[Step]:
    """The steps of one of the three commands. The riskiest and cheapest questions come first."""
    cuda, kernels = "tests/engine/cuda", "tests/kernels"
    benchmarks = (PYTHON, "-m", "benchmarks", "--output", str(output), "--resume")
    small = (f"{kernels}/test_paged_decode.py", f"{kernels}/test_paged_prefill.py", f"{kernels}/test_fused_moe.py")
    sanitized = ("compute-sanitizer", "--error-exitcode", "9", "--target-processes", "all")
    without = [f"--ignore={kernels}/{folder}" for folder in ("aot", "native", "benchmarks")]
    tune = (PYTHON, "-m", "benchmarks.wheels", "build/wheels", "trimtab_kernels.tune")
    place = (PYTHON, "-m", "benchmarks.calls", "install", "--output", str(output))
    batches = ("--batch-size", "1", "32", "256", "1024", "4096", "--save-path", str(output / "configs"))
    steps = {
        "gate": [
            Step("driver", ("nvidia-smi",), 20, needs="nvidia-smi"),
            Step("versions", (PYTHON, "-m", "benchmarks.machine", "gate"), 40),
            Step("mapped memory and swap", _pytest(f"{cuda}/test_mapped_memory.py", f"{cuda}/test_swap_cache.py"), 60),
            Step("kernels", _pytest(kernels, *without, jobs=jobs), 170),
            Step("memcheck", (*sanitized, "--tool", "memcheck", *_pytest(*small, "-x")), 60, "compute-sanitizer"),
            Step("racecheck", (*sanitized, "--tool", "racecheck", *_pytest(*small, "-x")), 40, "compute-sanitizer"),
            Step("graphs", _pytest(f"{cuda}/test_graphs.py", jobs=min(jobs, 3)), 120),
            Step("layouts", _pytest(f"{cuda}/test_layouts.py", jobs=min(jobs, 2)), 120),
        ],
        "rows": [Step("rows", (*benchmarks, "--budget-seconds", "550"), 560, ok=(DONE, OUT_OF_TIME))],
        "rest": [
            Step("rows", (*benchmarks, "--budget-seconds", "280"), 290, ok=(DONE, OUT_OF_TIME)),
            *(
                Step(f"tune {model}", (*tune, f"{SHAPES}/{model}.json", *batches, "--budget-seconds", "90"), 100,
                     ok=(DONE, OUT_OF_TIME))
                for model in ("llama-3.1-8b", "deepseek-v3")
            ),
            Step("tuned files to their place", place, 10),
            Step("float8 again", (*benchmarks[:-1], "--only", "w8a8", "--budget-seconds", "60"), 70,
                 ok=(DONE, OUT_OF_TIME)),
        ],
    }  # fmt: skip
    return steps[call]


def install(output: Path) -> int:
    """Tuned configurations from where they are kept to where the kernels look for them."""
    target = REPOSITORY / "kernels" / "trimtab_kernels" / "configs"
    for path in sorted((output / "configs").glob("*.json")):
        shutil.copy(path, target / path.name)
        print(f"installed {path.name}")
    return DONE


def run_step(step: Step, log: Path, seconds: float, environment: Mapping[str, str]) -> Outcome:
    """To its end, or until its time is over: then the whole process group is killed."""
    told = " ".join(Path(part).name if part == PYTHON else part for part in step.command)
    if step.needs and shutil.which(step.needs) is None:
        return Outcome(step.name, told, None, 0.0, f"left out: there is no {step.needs}")
    started = time.monotonic()
    with log.open("ab") as stream:
        stream.write(f"\n=== {step.name}: {told}\n".encode())
        stream.flush()
        process = subprocess.Popen(
            step.command, stdout=stream, stderr=stream, env=dict(environment), start_new_session=True, cwd=REPOSITORY
        )
        said = ""
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code, said = process.wait(), f"ended after its {seconds:.0f} s"
    if code in step.ok:
        code = DONE
    return Outcome(step.name, told, code, time.monotonic() - started, said)


def run_call(
    call: str, steps: list[Step], output: Path, say: Callable[[str], None], *, budget: float = CALL_SECONDS
) -> int:
    """All steps in their order within the budget. Exit code 0, 1 where a step failed, 3 where time ran out first."""
    output.mkdir(parents=True, exist_ok=True)
    log, summary = output / f"call-{call}.log", output / f"call-{call}.json"
    log.write_bytes(b"")
    paths = [str(REPOSITORY / "kernels"), str(REPOSITORY / "engine-image"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    end = time.monotonic() + budget - LAST_SECONDS
    outcomes: list[Outcome] = []
    for step in steps:
        left = end - time.monotonic()
        if left <= 1:
            outcomes.append(Outcome(step.name, "", None, 0.0, "left out: the time is over"))
        else:
            say(f"{step.name}: {min(step.seconds, left):.0f} s at most, {left:.0f} s left")
            outcomes.append(run_step(step, log, min(step.seconds, left), environment))
        last = outcomes[-1]
        say(f"  {last.said or ('passed' if last.code == DONE else f'exit code {last.code}')}, {last.seconds:.0f} s")
        summary.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
        _archive(output / "configs", output / "configs.tar.gz")
    for outcome in outcomes:
        if outcome.is_bad:
            say(f"failed: {outcome.step}; its output begins at '=== {outcome.step}' in {log.name}")
    if any(outcome.is_bad for outcome in outcomes):
        return FAILED
    return OUT_OF_TIME if any("the time is over" in outcome.said for outcome in outcomes) else DONE


def _archive(folder: Path, target: Path) -> None:
    """All of a folder as one file: names of tuned configurations have signs that some machines do not give back."""
    if not folder.is_dir():
        return
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        archive.add(folder, arcname=folder.name)
    target.write_bytes(content.getvalue())


def dry(steps: list[Step]) -> list[Step]:
    """The same steps, each only saying what it would run: the order, the log and the summary are the real ones."""
    return [
        Step(step.name, (PYTHON, "-c", "import sys; print('would run:', *sys.argv[1:])", *step.command), step.seconds)
        for step in steps
    ]


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 when every step passed, 1 when one failed, 2 without a GPU, 3 when time ran out before that."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.calls", description=__doc__.split("\n")[0])
    parser.add_argument("call", choices=("gate", "rows", "rest", "install"), help="install: tuned files to their place")
    parser.add_argument("--output", type=Path, default=Path("docs/results"), help="folder for all that is found")
    parser.add_argument("--jobs", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 2)), help="test processes")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run, with log and summary; no GPU")
    options = parser.parse_args(arguments)
    output: Path = options.output.absolute()
    if options.call == "install":
        return install(output)
    steps = steps_of(options.call, output, jobs=options.jobs)
    if options.dry_run:
        steps = dry(steps)
    elif (missing := what_is_missing()) is not None:
        print(f"{options.call}: {missing}; nothing was run", file=sys.stderr)
        return NO_GPU
    return run_call(options.call, steps, output, lambda text: print(text, flush=True))


if __name__ == "__main__":
    sys.exit(main())
