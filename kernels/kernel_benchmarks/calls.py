"""Three ten-minute commands for 30 minutes on a GPU machine: `python3 -m kernel_benchmarks.calls gate|rows|rest`.

gate    is it right: mapped memory and swap, graphs, layouts and images, which count the memory of the whole device and
        so have it alone; then, side by side in lanes, as nothing is timed, every kernel, the sanitizer, the engine,
        real sizes, families. What they compile is there for `rows` on the same machine
rows    how fast is it: limits, kernels, engine, peers
rest    what was not reached, then the tuner, and the float8 rows again with what it has found

Every step is a process group with a time of its own; one that fails or hangs does not keep the next from running. All
output goes into call-NAME.log (call-NAME-2.log of the second lane) from the first second on, and what came of each step
into call-NAME.json after it, so that a machine which is taken away has left what it found. call-NAME.tar.gz has all of
it: some machines give back a few files with plain names, and no more. triton-cache.tar.xz has the kernels that were
compiled; where the output has it at the begin, they are not compiled again (compiled.py).
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
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kernel_benchmarks import compiled
from kernel_benchmarks.engine_rows import GROUPS
from kernel_benchmarks.machine import what_is_missing
from kernel_benchmarks.phase import DONE, FAILED, NO_GPU, OUT_OF_TIME

CALL_SECONDS = 570.0
"""Below the ten minutes that a command may take on machines lent by the half hour."""
LAST_SECONDS = 15.0
"""Kept for the archives and the summary."""
PYTHON = sys.executable
REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {"TRITON_INTERPRET": "0", "PYTHONUNBUFFERED": "1"}
NO_TESTS = 5
"""pytest's exit code where nothing was selected."""
SHAPES = "kernels/kernel_benchmarks/shapes"


@dataclass(frozen=True, slots=True)
class Step:
    """One command and the seconds that it may take at most. `needs`: a program that must be there, else the step is
    left out and says so. `ok`: exit codes that are no failure. `lane`: from 1; steps of a lane run one after the other.
    The first lane has the device alone, and when it has ended the others begin, side by side."""

    name: str
    command: tuple[str, ...]
    seconds: float
    needs: str = ""
    ok: tuple[int, ...] = (DONE, NO_TESTS)
    lane: int = 1


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
    wheels = (PYTHON, "-m", "kernel_benchmarks.wheels", "build/wheels", "pytest")
    return (*wheels, *fixed, *spread, "--durations=5", *arguments)


def steps_of(call: str, output: Path, *, jobs: int) -> list[Step]:
    """The steps of one of the three commands. The riskiest and cheapest questions come first."""
    cuda, kernels = "tests/engine/cuda", "tests/kernels"
    benchmarks = (PYTHON, "-m", "kernel_benchmarks", "--output", str(output), "--resume")
    small = (f"{kernels}/test_paged_decode.py", f"{kernels}/test_paged_prefill.py", f"{kernels}/test_fused_moe.py")
    sanitized = ("compute-sanitizer", "--error-exitcode", "9", "--target-processes", "all")
    without = [f"--ignore={kernels}/{folder}" for folder in ("native", "kernel_benchmarks")]
    tune = (PYTHON, "-m", "kernel_benchmarks.wheels", "build/wheels", "trimtab_kernels.tune")
    place = (PYTHON, "-m", "kernel_benchmarks.calls", "install", "--output", str(output))
    batches = ("--batch-size", "1", "32", "256", "1024", "4096", "--save-path", str(output / "configs"))
    rehearsal, beside = (("--output", str(output / folder)) for folder in ("engine", "kernels"))
    # Their rates say nothing: the device is shared. Memory for the tests beside it, and for what the kernels take.
    engine = (PYTHON, "-m", "kernel_benchmarks.end_to_end", *rehearsal, "--gpu-memory-utilization", "0.5")
    steps = {
        "gate": [
            Step("driver", ("nvidia-smi",), 20, needs="nvidia-smi"),
            Step("versions", (PYTHON, "-m", "kernel_benchmarks.machine", "gate"), 40),
            Step("mapped memory and swap", _pytest(f"{cuda}/test_mapped_memory.py", f"{cuda}/test_swap_cache.py"), 60),
            Step("graphs", _pytest(f"{cuda}/test_graphs.py", f"{cuda}/test_adapters.py", jobs=1), 99),
            Step("layouts", _pytest(f"{cuda}/test_layouts.py", jobs=min(jobs, 3)), 90),
            Step("images", _pytest(f"{cuda}/test_images.py", jobs=1), 90),
            Step("kernels", _pytest(kernels, *without, jobs=jobs), 300, lane=2),
            Step("families", _pytest(f"{cuda}/test_families.py", jobs=min(jobs, 3)), 200, lane=6),
            Step("memcheck", (*sanitized, "--tool", "memcheck", *_pytest(*small, "-x")), 150, "compute-sanitizer",
                 lane=3),
            Step("racecheck", (*sanitized, "--tool", "racecheck", *_pytest(*small, "-x")), 150, "compute-sanitizer",
                 lane=3),
            Step("limits", (PYTHON, "-m", "kernel_benchmarks.limits", *rehearsal), 60, lane=4),
            *(Step(f"engine {group.shape.name}", (*engine, "--group", str(number)), 200, lane=4)
              for number, group in enumerate(GROUPS[:2])),
            Step("kernels at real sizes", (PYTHON, "-m", "kernel_benchmarks", "--kernels", *beside), 300, lane=5,
                 ok=(DONE, OUT_OF_TIME)),
        ],
        "rows": [Step("rows", (*benchmarks, "--budget-seconds", "545"), 555, ok=(DONE, OUT_OF_TIME))],
        "rest": [
            Step("rows", (*benchmarks, "--budget-seconds", "265"), 275, ok=(DONE, OUT_OF_TIME)),
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
    call: str,
    steps: list[Step],
    output: Path,
    say: Callable[[str], None],
    *,
    budget: float = CALL_SECONDS,
    kernels: Path = compiled.FOLDER,
) -> int:
    """All steps within the budget, in their order in each lane, the first lane before the others. Exit code 0, 1 where
    one failed, 3 out of time."""
    output.mkdir(parents=True, exist_ok=True)
    lanes = sorted({step.lane for step in steps})
    logs = {lane: output / f"call-{call}{f'-{lane}' if lane > 1 else ''}.log" for lane in lanes}
    for log in logs.values():
        log.write_bytes(b"")
    paths = [str(REPOSITORY / "kernels"), str(REPOSITORY / "engine-image"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment[compiled.VARIABLE] = str(kernels)
    say(f"{compiled.unpack(output / compiled.ARCHIVE, kernels)} files of compiled kernels were carried here")
    end = time.monotonic() + budget - LAST_SECONDS
    found: dict[str, Outcome] = {}
    writing = threading.Lock()

    def run_lane(lane: int) -> None:
        for step in (step for step in steps if step.lane == lane):
            left = end - time.monotonic()
            if left <= 1:
                outcome = Outcome(step.name, "", None, 0.0, "left out: the time is over")
            else:
                say(f"{step.name}: {min(step.seconds, left):.0f} s at most, {left:.0f} s left")
                outcome = run_step(step, logs[lane], min(step.seconds, left), environment)
            with writing:
                found[step.name] = outcome
                came = outcome.said or ("passed" if outcome.code == DONE else f"exit code {outcome.code}")
                say(f"  {step.name}: {came}, {outcome.seconds:.0f} s")
                ended = [asdict(found[step.name]) for step in steps if step.name in found]
                (output / f"call-{call}.json").write_text(json.dumps(ended, indent=1) + "\n")
                _archive(output, output / f"call-{call}.tar.gz")

    alone, *beside = lanes
    run_lane(alone)
    with ThreadPoolExecutor(max(1, len(beside))) as pool:
        for ended in [pool.submit(run_lane, lane) for lane in beside]:
            ended.result()
    say(f"{compiled.pack(output / compiled.ARCHIVE, kernels)} files of compiled kernels to carry on")
    for step in steps:
        if found[step.name].is_bad:
            say(f"failed: {step.name}; its output begins at '=== {step.name}' in {logs[step.lane].name}")
    if any(outcome.is_bad for outcome in found.values()):
        return FAILED
    return OUT_OF_TIME if any("the time is over" in outcome.said for outcome in found.values()) else DONE


def _archive(folder: Path, target: Path) -> None:
    """All of a folder but its archives as one file. Whoever reads it meanwhile finds the one before."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        archive.add(folder, arcname=".", filter=lambda member: None if ".tar." in member.name else member)
    beside = target.with_suffix(".part")
    beside.write_bytes(content.getvalue())
    beside.replace(target)


def dry(steps: list[Step]) -> list[Step]:
    """The same steps, each only saying what it would run: the order, the log and the summary are the real ones."""
    return [
        replace(step, command=(PYTHON, "-c", "import sys; print('would run:', *sys.argv[1:])", *step.command), needs="")
        for step in steps
    ]


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 when every step passed, 1 when one failed, 2 without a GPU, 3 when time ran out before that."""
    parser = argparse.ArgumentParser(prog="python3 -m kernel_benchmarks.calls", description=__doc__.split("\n")[0])
    parser.add_argument("call", choices=("gate", "rows", "rest", "install"), help="install: tuned files to their place")
    parser.add_argument("--output", type=Path, default=Path("docs/results"), help="folder for all that is found")
    parser.add_argument("--jobs", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 2)), help="test processes")
    parser.add_argument("--budget-seconds", type=float, default=CALL_SECONDS, help="after that the call has ended")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run, with log and summary; no GPU")
    options = parser.parse_args(arguments)
    output: Path = options.output.absolute()
    if options.call == "install":
        return install(output)
    steps, kernels = steps_of(options.call, output, jobs=options.jobs), compiled.FOLDER
    if options.dry_run:
        steps, kernels = dry(steps), output / "triton-cache"
    elif (missing := what_is_missing()) is not None:
        print(f"{options.call}: {missing}; nothing was run", file=sys.stderr)
        return NO_GPU
    return run_call(
        options.call,
        steps,
        output,
        lambda text: print(text, flush=True),
        budget=options.budget_seconds,
        kernels=kernels,
    )


if __name__ == "__main__":
    sys.exit(main())
