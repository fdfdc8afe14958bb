"""Three ten-minute commands for 30 minutes on a GPU machine: `python3 -m kernel_benchmarks.calls gate|rows|rest`.

gate    correctness: mapped memory and swap, graphs, layouts and images, which count the memory of the whole device and
        therefore run exclusively; then every kernel, the sanitizer, the engine, real sizes and families in parallel
        lanes, because nothing is timed. `rows` reuses the compiled kernels on the same machine
rows    performance: limits, kernels, engine, peers
rest    rows that were not reached, then the tuner, and the float8 rows again with its configurations

Every step is a process group with a time limit; a failed or hanging step does not prevent the next one. All output is
written to call-NAME.log (call-NAME-2.log for the second lane) immediately, and each step's result to call-NAME.json
after it, so that results survive the loss of the machine. call-NAME.tar.gz contains all of it, for machines that return
only a few files with plain names. triton-cache.tar.xz contains the compiled kernels; if the output folder has it at the
start, they are not compiled again (compiled.py).
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
from kernel_benchmarks.machine import missing_requirement
from kernel_benchmarks.phase import DONE, FAILED, NO_GPU, OUT_OF_TIME

CALL_SECONDS = 570.0
"""Below the ten-minute command limit of shared machines."""
LAST_SECONDS = 15.0
"""Reserved for the archives and the summary."""
PYTHON = sys.executable
REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {"TRITON_INTERPRET": "0", "PYTHONUNBUFFERED": "1"}
NO_TESTS = 5
"""pytest's exit code if no test was selected."""
SHAPES = "kernels/kernel_benchmarks/shapes"


@dataclass(frozen=True, slots=True)
class Step:
    """One command and its time limit in seconds. `needs`: a required program; without it the step is skipped with a
    message. `ok`: exit codes that are not failures. `lane`: from 1; steps of a lane run one after the other. The first
    lane has the device exclusively; the other lanes start when it has ended, in parallel.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    needs: str = ""
    ok: tuple[int, ...] = (DONE, NO_TESTS)
    lane: int = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a step. `code` is None if the step was skipped; `note` has the reason, or says that it was stopped."""

    step: str
    command: str
    code: int | None
    seconds: float
    note: str = ""

    @property
    def is_bad(self) -> bool:
        return self.note.startswith("stopped") or (self.code is not None and not self.note and self.code != DONE)


def _pytest(*arguments: str, jobs: int = 0) -> tuple[str, ...]:
    """Return the pytest command on the device. Its options replace pyproject.toml's, which name plug-ins that such a
    machine may lack.
    """
    spread = ("-n", str(jobs)) if jobs else ()
    fixed = ("-q", "-o", "addopts=--import-mode=importlib", "-W", "default", "-p", "no:cacheprovider", "-m", "not cpu")
    wheels = (PYTHON, "-m", "kernel_benchmarks.wheels", "build/wheels", "pytest")
    return (*wheels, *fixed, *spread, "--durations=5", *arguments)


def steps_of(call: str, output: Path, *, jobs: int) -> list[Step]:
    """Return the steps of one of the three commands. The riskiest and cheapest steps come first."""
    cuda, kernels = "tests/engine/cuda", "tests/kernels"
    benchmarks = (PYTHON, "-m", "kernel_benchmarks", "--output", str(output), "--resume")
    small = (f"{kernels}/test_paged_decode.py", f"{kernels}/test_paged_prefill.py", f"{kernels}/test_fused_moe.py")
    sanitized = ("compute-sanitizer", "--error-exitcode", "9", "--target-processes", "all")
    without = [f"--ignore={kernels}/{folder}" for folder in ("native", "kernel_benchmarks")]
    tune = (PYTHON, "-m", "kernel_benchmarks.wheels", "build/wheels", "trimtab_kernels.tune")
    place = (PYTHON, "-m", "kernel_benchmarks.calls", "install", "--output", str(output))
    batches = ("--batch-size", "1", "32", "256", "1024", "4096", "--save-path", str(output / "configs"))
    rehearsal, concurrent = (("--output", str(output / folder)) for folder in ("engine", "kernels"))
    # Their rates mean nothing: the device is shared. Leaves memory for concurrent tests and for the kernels' own
    # allocations.
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
            Step("kernels at real sizes", (PYTHON, "-m", "kernel_benchmarks", "--kernels", *concurrent), 300, lane=5,
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
    """Copy tuned configurations from the output folder to the kernels' folder."""
    target = REPOSITORY / "kernels" / "trimtab_kernels" / "configs"
    for path in sorted((output / "configs").glob("*.json")):
        shutil.copy(path, target / path.name)
        print(f"installed {path.name}")
    return DONE


def run_step(step: Step, log: Path, seconds: float, environment: Mapping[str, str]) -> Outcome:
    """Run a step to its end, or kill its process group at its time limit."""
    text = " ".join(Path(part).name if part == PYTHON else part for part in step.command)
    if step.needs and shutil.which(step.needs) is None:
        return Outcome(step.name, text, None, 0.0, f"skipped: {step.needs} is not installed")
    started = time.monotonic()
    with log.open("ab") as stream:
        stream.write(f"\n=== {step.name}: {text}\n".encode())
        stream.flush()
        process = subprocess.Popen(
            step.command, stdout=stream, stderr=stream, env=dict(environment), start_new_session=True, cwd=REPOSITORY
        )
        note = ""
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code, note = process.wait(), f"stopped after {seconds:.0f} s"
    if code in step.ok:
        code = DONE
    return Outcome(step.name, text, code, time.monotonic() - started, note)


def run_call(
    call: str,
    steps: list[Step],
    output: Path,
    report: Callable[[str], None],
    *,
    budget: float = CALL_SECONDS,
    kernels: Path = compiled.FOLDER,
) -> int:
    """Run all steps within the budget, in order in each lane, the first lane before the others. Return exit code 0, 1
    if one failed, 3 out of time.
    """
    output.mkdir(parents=True, exist_ok=True)
    lanes = sorted({step.lane for step in steps})
    logs = {lane: output / f"call-{call}{f'-{lane}' if lane > 1 else ''}.log" for lane in lanes}
    for log in logs.values():
        log.write_bytes(b"")
    paths = [str(REPOSITORY / "kernels"), str(REPOSITORY / "engine-image"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment[compiled.VARIABLE] = str(kernels)
    report(f"{compiled.unpack(output / compiled.ARCHIVE, kernels)} compiled kernel files restored")
    end = time.monotonic() + budget - LAST_SECONDS
    found: dict[str, Outcome] = {}
    writing = threading.Lock()

    def run_lane(lane: int) -> None:
        for step in (step for step in steps if step.lane == lane):
            left = end - time.monotonic()
            if left <= 1:
                outcome = Outcome(step.name, "", None, 0.0, "skipped: out of time")
            else:
                report(f"{step.name}: {min(step.seconds, left):.0f} s at most, {left:.0f} s left")
                outcome = run_step(step, logs[lane], min(step.seconds, left), environment)
            with writing:
                found[step.name] = outcome
                result = outcome.note or ("passed" if outcome.code == DONE else f"exit code {outcome.code}")
                report(f"  {step.name}: {result}, {outcome.seconds:.0f} s")
                ended = [asdict(found[step.name]) for step in steps if step.name in found]
                (output / f"call-{call}.json").write_text(json.dumps(ended, indent=1) + "\n")
                _archive(output, output / f"call-{call}.tar.gz")

    exclusive, *concurrent = lanes
    run_lane(exclusive)
    with ThreadPoolExecutor(max(1, len(concurrent))) as pool:
        for ended in [pool.submit(run_lane, lane) for lane in concurrent]:
            ended.result()
    report(f"{compiled.pack(output / compiled.ARCHIVE, kernels)} compiled kernel files archived")
    for step in steps:
        if found[step.name].is_bad:
            report(f"failed: {step.name}; its output begins at '=== {step.name}' in {logs[step.lane].name}")
    if any(outcome.is_bad for outcome in found.values()):
        return FAILED
    return OUT_OF_TIME if any("out of time" in outcome.note for outcome in found.values()) else DONE


def _archive(folder: Path, target: Path) -> None:
    """Archive a folder, except its archives, as one file that is replaced atomically."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        archive.add(folder, arcname=".", filter=lambda member: None if ".tar." in member.name else member)
    temporary = target.with_suffix(".part")
    temporary.write_bytes(content.getvalue())
    temporary.replace(target)


def dry(steps: list[Step]) -> list[Step]:
    """Return the same steps, each only printing its command: order, log and summary are the real ones."""
    return [
        replace(step, command=(PYTHON, "-c", "import sys; print('would run:', *sys.argv[1:])", *step.command), needs="")
        for step in steps
    ]


def main(arguments: list[str] | None = None) -> int:
    """Return exit code 0 if every step passed, 1 if one failed, 2 without a GPU, 3 if time ran out."""
    parser = argparse.ArgumentParser(prog="python3 -m kernel_benchmarks.calls", description=__doc__.split("\n")[0])
    parser.add_argument(
        "call", choices=("gate", "rows", "rest", "install"), help="install: copy tuned configurations to the kernels"
    )
    parser.add_argument("--output", type=Path, default=Path("docs/results"), help="results folder")
    parser.add_argument("--jobs", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 2)), help="test processes")
    parser.add_argument("--budget-seconds", type=float, default=CALL_SECONDS, help="total time limit of the command")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the commands without running them; needs no GPU",
    )
    options = parser.parse_args(arguments)
    output: Path = options.output.absolute()
    if options.call == "install":
        return install(output)
    steps, kernels = steps_of(options.call, output, jobs=options.jobs), compiled.FOLDER
    if options.dry_run:
        steps, kernels = dry(steps), output / "triton-cache"
    elif (missing := missing_requirement()) is not None:
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
