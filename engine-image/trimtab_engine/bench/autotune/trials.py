"""Making one run: the live change, the load of `bench serve`, and the figures of it."""

import argparse
import sys
import time
import zlib
from dataclasses import dataclass

from trimtab_engine.bench.autotune.engine import LiveEngine
from trimtab_engine.bench.autotune.limits import Figures, Limits
from trimtab_engine.bench.autotune.search import Purpose, Seen, Trial
from trimtab_engine.bench.autotune.state import Run
from trimtab_engine.bench.serving import report, server
from trimtab_engine.bench.serving.load import run_load
from trimtab_engine.bench.serving.run import load_of
from trimtab_engine.bench.serving.statistics import METRICS, Goodput, summarize
from trimtab_engine.errors import ConfigError, EngineDead, TrimtabError

ALONE_PROMPTS = 5
FINAL_PROMPTS = 2  # times those of a run
MAX_CONTENT_SEED = 1 << 31
ENDED = "the engine ended under these values"


class Interrupted(TrimtabError):
    """Ctrl-C during a run. Exit code 130."""


@dataclass(frozen=True, slots=True)
class Trials:
    """How runs of this search are made."""

    arguments: argparse.Namespace
    limits: Limits
    model: server.ServedModel

    async def make(self, engine: LiveEngine, trial: Trial) -> Run:
        """Change the values, send the load, measure. Values that are refused, or that the engine ends under, are
        seen, too. Raises Interrupted, ChangedMeanwhile."""
        started = time.monotonic()
        await engine.check_unchanged()  # one that is gone already did not end under these values
        try:
            refused = await engine.set(trial.setting.values)
        except EngineDead:
            refused = ENDED
        if refused is not None:
            return Run(trial, Seen({}, refused), time.monotonic() - started)
        await engine.forget_prefixes()
        figures = await self._measure(engine, trial)
        try:
            await engine.check_unchanged()
        except EngineDead:
            return Run(trial, Seen(figures, ENDED), time.monotonic() - started)
        return Run(trial, Seen(figures), time.monotonic() - started)

    async def _measure(self, engine: LiveEngine, trial: Trial) -> Figures:
        place = engine.place
        load, _ = load_of(self._arguments_of(trial), place.url, place.headers, self.model)
        before = await server.counters(place.url, place.headers)
        outcome = await run_load(load, lambda result: None, warmups=1)
        if outcome.interrupted:
            raise Interrupted("Ctrl-C")
        failed = [result.error for result in outcome.results if not result.success]
        if failed:
            print(f"{len(failed)} requests failed:\n{report.errors_line(failed)}", file=sys.stderr)
        during = server.during(before, await server.counters(place.url, place.headers))
        summary = summarize(outcome, metrics=METRICS[:4], percentiles=self.limits.percentiles, goodput=Goodput({}))
        del summary["interrupted"]
        return {**summary, **during}

    def _arguments_of(self, trial: Trial) -> argparse.Namespace:
        """Those of a `bench serve`. Every run says something else, so that no prompt is known from another run."""
        count = self.arguments.num_prompts
        given = dict(vars(self.arguments))
        if trial.purpose is Purpose.ALONE:
            given |= {"num_prompts": min(count, ALONE_PROMPTS), "max_concurrency": 1}
        elif trial.purpose is Purpose.FINAL:
            given |= {"num_prompts": count * FINAL_PROMPTS}
        seed = zlib.crc32(repr((self.arguments.seed, trial)).encode()) % MAX_CONTENT_SEED
        return argparse.Namespace(**given | {"request_rate": trial.rate, "content_seed": seed})


def check_answers(run: Run) -> None:
    """Raise ConfigError where not one request of a first run was answered: no values would mend that."""
    if run.seen.refused is None and not run.seen.figures.get("completed"):
        raise ConfigError(
            "not one request of the first run was answered, for the reasons above: no values would mend that; try one "
            "with trimtab-engine bench serve --num-prompts 1"
        )
