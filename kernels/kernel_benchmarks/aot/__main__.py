"""`make aot` compiles everything and writes docs/results; `--sample`, used by `make test`, compiles a fixed sample for
sm_90 and all kernels that differ from the committed figures.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

from trimtab_kernels.launch.device_facts import H200, TARGETS
from trimtab_kernels.launch.jit import HAS_TRITON

from kernel_benchmarks.aot.cases import all_cases
from kernel_benchmarks.aot.compiler import Compiled, Job, compile_job, load, store
from kernel_benchmarks.aot.report import recorded_keys, write_report

_jobs: list[Job] = []
"""Filled before the workers fork: kernels cannot be pickled."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m kernel_benchmarks.aot", description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="folder of results, by hash of source and choice")
    parser.add_argument("--results", type=Path, help="folder of aot.json and kernels.md: written, or read by --sample")
    parser.add_argument("--sample", action="store_true", help="sm_90 only: a fixed sample, and changed kernels")
    parser.add_argument("--targets", type=int, nargs="+", default=[80, 89, 90, 100], help="compute capabilities")
    parser.add_argument(
        "--budget-seconds", type=float, default=math.inf, help="with --sample: begin nothing but the sample after this"
    )
    parser.add_argument("--only", default="", help="only cases whose name contains this; writes no results")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (the cores)")
    return parser.parse_args(arguments)


def find_jobs(*, only: str, targets: list[int]) -> list[Job]:
    """Return the distinct jobs of the cases whose name contains `only`, in the order of the report."""
    jobs: dict[str, Job] = {}
    for case in all_cases():
        for facts in TARGETS:
            if only in case.name and facts.capability in targets:
                for launch in case.launches(facts):
                    job = Job.of(case.name, facts, launch)
                    jobs.setdefault(job.key, job)
    return list(jobs.values())


def find_sample(*, only: str, known: set[str]) -> tuple[list[Job], list[Job]]:
    """Return (the fixed sample, jobs that are not among the `known` keys), both for sm_90."""
    in_sample = {case.name for case in all_cases() if case.in_sample}
    jobs = find_jobs(only=only, targets=[H200.capability])
    return [j for j in jobs if j.case in in_sample], [j for j in jobs if j.case not in in_sample and j.key not in known]


def _compile(index: int) -> Compiled:
    return compile_job(_jobs[index])


def _short_error(error: Exception) -> str:
    """Shorten Triton's errors, which quote the kernel up to the faulty line, to that line and the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    return f"{type(error).__name__}: {' … '.join(lines[-2:])[:500]}"


def completed_futures(futures: set[Future[Compiled]], deadline: float) -> Iterator[Future[Compiled]]:
    """Yield futures as they end. After the deadline, futures that have not started are cancelled and never yielded:
    `as_completed` would wait for them forever.
    """
    while futures:
        ended, futures = wait(futures, return_when=FIRST_COMPLETED)
        yield from ended
        if time.monotonic() > deadline:
            futures = {future for future in futures if not future.cancel()}


def compile_all(
    jobs: list[Job], cache: Path, workers: int, deadline: float = math.inf
) -> tuple[list[Compiled], list[str]]:
    """Return (results, errors), from the cache if available, in the order of the jobs. After the deadline (monotonic
    clock), no further job is started.
    """
    results = {job.key: found for job in jobs if (found := load(cache, job.key)) is not None}
    _jobs[:] = [job for job in jobs if job.key not in results]
    errors: list[str] = []
    print(f"{len(results)} of {len(jobs)} kernels are in {cache}; compiling {len(_jobs)}", flush=True)
    for target in sorted({job.facts.capability for job in _jobs}):
        # Each target in separate processes: triton 3.6 converts float8 as for the first target of a process.
        of_target = [index for index, job in enumerate(_jobs) if job.facts.capability == target]
        with ProcessPoolExecutor(max_workers=workers, mp_context=get_context("fork")) as pool:
            futures = {pool.submit(_compile, index): _jobs[index] for index in of_target}
            for done, future in enumerate(completed_futures(set(futures), deadline), start=1):
                job = futures[future]
                try:
                    results[job.key] = future.result()
                    store(cache, results[job.key])
                except Exception as error:  # any error: one kernel that cannot be compiled must not hide the others
                    errors.append(f"{job.case} for sm_{target}: {_short_error(error)}")
                    print(f"failed: {errors[-1]}", flush=True)
                if done % 20 == 0:
                    print(f"{done} of {len(of_target)} for sm_{target}", flush=True)
    return [results[job.key] for job in jobs if job.key in results], errors


def main(arguments: list[str] | None = None) -> int:
    """Return exit code 0 if every kernel compiles and fits its targets, 1 otherwise, 2 without Triton or if --only
    matches no case.
    """
    options = parse(arguments)
    if not HAS_TRITON:
        print("aot: triton is not installed; install it (the development extra brings it)", file=sys.stderr)
        return 2
    if "TRITON_INTERPRET" in os.environ:
        print("aot: TRITON_INTERPRET is set, so kernels are not compiled; unset it", file=sys.stderr)
        return 2
    cases = [case.name for case in all_cases()]
    if not any(options.only in name for name in cases):
        names = dict.fromkeys(name.split()[0] for name in cases)
        print(f"aot: no kernel's name contains {options.only!r}; they are {', '.join(names)}", file=sys.stderr)
        return 2
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trimtab-aot-") as scratch:
        os.environ["TRITON_CACHE_DIR"] = scratch  # Triton's own cache would grow by tens of MiB per run
        if options.sample:
            jobs, changed = find_sample(only=options.only, known=recorded_keys(options.results))
            results, errors = compile_all(jobs, options.cache, options.jobs)
            deadline = started + options.budget_seconds
            more, more_errors = compile_all(changed, options.cache, options.jobs, deadline)
            results, errors = results + more, errors + more_errors
            left = len(changed) - len(more) - len(more_errors)
            if left:
                print(f"{left} changed kernels are left to `make aot`: the time is over")
        else:
            jobs = find_jobs(only=options.only, targets=options.targets)
            results, errors = compile_all(jobs, options.cache, options.jobs)
    if options.results and not options.sample and not options.only and not errors:
        write_report(options.results, results)
    spilled = sum(1 for r in results if r.spill_bytes)
    seconds = time.monotonic() - started
    print(f"{len(results)} kernels compile and fit, {len(errors)} do not, {spilled} spill; {seconds:.0f} s")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
