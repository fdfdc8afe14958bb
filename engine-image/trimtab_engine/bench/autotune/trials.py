"""Execution of one trial: live change, load of `bench serve`, and its figures."""

import argparse
import sys
import time
import zlib
from dataclasses import dataclass

from trimtab_engine.bench.autotune.engine import LiveEngine
from trimtab_engine.bench.autotune.limits import Figures, Limits
from trimtab_engine.bench.autotune.search import Purpose, Trial, TrialResult
from trimtab_engine.bench.autotune.state import Run
from trimtab_engine.bench.serving import report, server
from trimtab_engine.bench.serving.load import run_load
from trimtab_engine.bench.serving.run import build_load
from trimtab_engine.bench.serving.statistics import METRICS, Goodput, summarize
from trimtab_engine.errors import ConfigError, EngineDead, TrimtabError

SINGLE_REQUEST_PROMPTS = 5
FINAL_PROMPTS = 2  # times the number of prompts of a trial
MAX_CONTENT_SEED = 1 << 31
ENDED = "the engine ended with these values"


class Interrupted(TrimtabError):
    """Ctrl-C during a run. Exit code 130."""


@dataclass(frozen=True, slots=True)
class Trials:
    """Runner of this search's trials."""

    arguments: argparse.Namespace
    limits: Limits
    model: server.ServedModel

    async def make(self, engine: LiveEngine, trial: Trial) -> Run:
        """Set the values, send the load, measure. Rejected values and a failed engine are results too. Raises
        Interrupted, ChangedMeanwhile.
        """
        started = time.monotonic()
        await engine.check_unchanged()  # an engine that is already gone did not fail because of these values
        try:
            refused = await engine.set(trial.setting.values)
        except EngineDead:
            refused = ENDED
        if refused is not None:
            return Run(trial, TrialResult({}, refused), time.monotonic() - started)
        await engine.reset_prefix_cache()
        figures = await self._measure(engine, trial)
        try:
            await engine.check_unchanged()
        except EngineDead:
            return Run(trial, TrialResult(figures, ENDED), time.monotonic() - started)
        return Run(trial, TrialResult(figures), time.monotonic() - started)

    async def _measure(self, engine: LiveEngine, trial: Trial) -> Figures:
        place = engine.place
        load, _ = build_load(self._arguments_of(trial), place.url, place.headers, self.model)
        before = await server.counters(place.url, place.headers)
        outcome = await run_load(load, lambda result: None, warmups=1)
        if outcome.interrupted:
            raise Interrupted("Ctrl-C")
        failed = [result.error for result in outcome.results if not result.success]
        if failed:
            print(f"{len(failed)} requests failed:\n{report.errors_line(failed)}", file=sys.stderr)
        during = server.counter_changes(before, await server.counters(place.url, place.headers))
        summary = summarize(outcome, metrics=METRICS[:4], percentiles=self.limits.percentiles, goodput=Goodput({}))
        del summary["interrupted"]
        return {**summary, **during}

    def _arguments_of(self, trial: Trial) -> argparse.Namespace:
        """Return the arguments of a `bench serve`. Every trial has different prompts, so that none is cached from
        another one.
        """
        count = self.arguments.num_prompts
        given = dict(vars(self.arguments))
        if trial.purpose is Purpose.SINGLE_REQUEST:
            given |= {"num_prompts": min(count, SINGLE_REQUEST_PROMPTS), "max_concurrency": 1}
        elif trial.purpose is Purpose.FINAL:
            given |= {"num_prompts": count * FINAL_PROMPTS}
        seed = zlib.crc32(repr((self.arguments.seed, trial)).encode()) % MAX_CONTENT_SEED
        return argparse.Namespace(**given | {"request_rate": trial.rate, "content_seed": seed})


def check_answers(run: Run) -> None:
    """Raise ConfigError if no request of the first trial succeeded: no values could fix that."""
    if run.seen.refused is None and not run.seen.figures.get("completed"):
        raise ConfigError(
            "all requests of the first run failed, for the reasons above; try a single one with trimtab-engine bench "
            "serve --num-prompts 1"
        )
