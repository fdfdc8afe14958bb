"""One `autotune` from its arguments to its report: the only place here where things are put together."""

import argparse
import asyncio
import hashlib
import json
import math
import platform
import shlex
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trimtab_engine.bench.autotune import report
from trimtab_engine.bench.autotune.engine import ENVELOPE, TUNED, LiveEngine, Place
from trimtab_engine.bench.autotune.limits import Limits
from trimtab_engine.bench.autotune.page import page
from trimtab_engine.bench.autotune.patch import resource_patch
from trimtab_engine.bench.autotune.search import Search, Steps, Trial
from trimtab_engine.bench.autotune.space import Space, space_of
from trimtab_engine.bench.autotune.state import Run, State, open_state
from trimtab_engine.bench.autotune.trials import ENDED, Interrupted, Trials, check_answers
from trimtab_engine.bench.inputs import check_folder, check_inputs, check_urls
from trimtab_engine.bench.local_server import SERVED_NAME, end_on_sigterm, local_server
from trimtab_engine.bench.serving import server
from trimtab_engine.bench.serving.run import headers_of
from trimtab_engine.errors import ConfigError, EngineDead
from trimtab_engine.sources.name import remote_model
from trimtab_engine.weights.open import model_path

EXIT_NOT_FOUND, EXIT_INTERRUPTED = 1, 130
LOAD_FIELDS = (
    "dataset_name", "num_prompts", "input_len", "output_len", "random_input_len", "random_output_len",
    "random_prefix_len", "random_range_ratio", "prefix_repetition_prefix_len", "prefix_repetition_suffix_len",
    "prefix_repetition_num_prefixes", "prefix_repetition_output_len", "sharegpt_output_len", "custom_output_len",
    "backend", "seed", "temperature", "top_p", "top_k", "min_p", "ignore_eos", "extra_body", "burstiness",
)  # fmt: skip
"""What makes two runs those of the same load."""
EXPECTED_RUN_SECONDS = 30.0  # until one has been made


def run_autotune(arguments: argparse.Namespace) -> int:
    """Search and report. Exit code: 0 found and confirmed, 1 nothing keeps the limits, 130 Ctrl-C."""
    limits = Limits.parse(arguments.limits or [], arguments.min_cache_hit)
    folder = Path(arguments.result_dir)
    check_folder("--result-dir", folder)
    _check(arguments)
    was_there = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.restart:
        (folder / "state.json").unlink(missing_ok=True)
    try:
        return asyncio.run(_tune(arguments, limits, folder))
    except ConfigError:
        if not was_there and not (folder / "state.json").exists():
            shutil.rmtree(folder)  # nothing but the log of a server that refused, whose last line is told
        raise
    except (Interrupted, KeyboardInterrupt):
        print(f"\ninterrupted; the same command goes on from {folder / 'state.json'}", file=sys.stderr)
        return EXIT_INTERRUPTED


def _check(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for what can be known to be wrong before a server starts, or is asked."""
    headers_of(arguments)
    check_urls(arguments)
    check_inputs(arguments)
    if is_url(arguments.model):
        if arguments.admin_url is None:
            raise ConfigError(
                f"{arguments.model} is changed through its admin API; start the server with --admin-port PORT, and "
                f"give --admin-url http://HOST:PORT"
            )
        if arguments.serve_flags:
            raise ConfigError("--serve-flags are of a server that is started here, and a URL is one that runs")
        return
    try:
        shlex.split(arguments.serve_flags or "")
    except ValueError as error:
        raise ConfigError(f"--serve-flags {arguments.serve_flags!r}: {error}; close what was opened") from None
    if remote_model(arguments.model) is None:
        model_path(arguments.model)


async def _tune(arguments: argparse.Namespace, limits: Limits, folder: Path) -> int:
    async with _engine(arguments, folder) as place:
        await server.wait_until_ready(place.url, place.headers, arguments.ready_check_timeout_sec)
        model = await server.served_model(place.url, place.headers, arguments.served_model_name)
        engine = await LiveEngine.look(place)
        space = _space(arguments, engine)
        _share_prefixes(arguments, limits, int(engine.envelope["block_size"]))
        state = open_state(folder / "state.json", _settings(arguments, limits, engine, model), engine.tuned)
        search = Search(space, limits, tries_all=arguments.all_candidates)
        facts = _facts(arguments, engine, model, place)
        kept = not is_url(arguments.model)  # a server of our own ends, and has nobody to put it back for
        try:
            runs = await _search(search, Trials(arguments, limits, model), engine, state, arguments.max_seconds)
            kept = kept or (arguments.keep and await _keep(engine, search))
        finally:
            if not kept:
                await _put_back(engine, state)
    _write(arguments, search, facts, runs, folder)
    return 0 if report.found(search) is not None else EXIT_NOT_FOUND


# --- the engine ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _engine(arguments: argparse.Namespace, folder: Path) -> AsyncIterator[Place]:
    """The server of the URL, or one of our own that serves the model as long as the search lasts."""
    headers = headers_of(arguments)
    token = {"Authorization": f"Bearer {arguments.admin_token}"} if arguments.admin_token else {}
    if is_url(arguments.model):
        yield Place(arguments.model.rstrip("/"), arguments.admin_url.rstrip("/"), headers, token)
        return
    end_on_sigterm()
    print(f"starting {arguments.model}; its log is {folder / 'server.log'}", file=sys.stderr)
    arguments.served_model_name = SERVED_NAME
    arguments.tokenizer = arguments.tokenizer or _folder(arguments.model)
    async with local_server(arguments.model, _serve_flags(arguments), folder / "server.log") as own:
        yield Place(own.url, own.admin_url, headers, token)


def _folder(model: str) -> str | None:
    """The model's folder; None: it has another form, and the server says where it is."""
    return model if Path(model).is_dir() else None


def is_url(text: str) -> bool:
    """Whether it is a running server, rather than a model."""
    return text.startswith(("http://", "https://"))


def _serve_flags(arguments: argparse.Namespace) -> list[str]:
    """Those that were given, and caps that make room for what is searched."""
    given = shlex.split(arguments.serve_flags or "")
    named = {flag.partition("=")[0] for flag in given}
    caps = {
        "--max-num-seqs-cap": max(arguments.num_seqs_list or [0]) or None,
        "--max-num-batched-tokens-cap": max(arguments.num_batched_tokens_list or [0]) or None,
        "--gpu-memory-utilization-cap": arguments.max_utilization,
    }
    return given + [word for flag, cap in caps.items() if cap and flag not in named for word in (flag, str(cap))]


def _space(arguments: argparse.Namespace, engine: LiveEngine) -> Space:
    """Between the engine's start value, unless another one is given, and its cap."""
    cap = float(engine.envelope["gpu_memory_utilization_cap"])
    high = min(arguments.max_utilization or cap, cap)
    low = arguments.min_utilization or min(float(engine.tuned["gpu_memory_utilization"]), high)
    if low > high:
        raise ConfigError(f"--min-utilization {low:g} is above {high:g}, the most that this engine can be set to")
    return space_of(
        seats=arguments.num_seqs_list,
        budgets=arguments.num_batched_tokens_list,
        seats_cap=int(engine.envelope["max_num_seqs_cap"]),
        budget_cap=int(engine.envelope["max_num_batched_tokens_cap"]),
        utilization=(low, math.floor(high * 100 + 1e-9) / 100),
    )


async def _keep(engine: LiveEngine, search: Search) -> bool:
    """Leave the engine at what was found; False where nothing was."""
    setting = report.found(search)
    return setting is not None and await engine.set(setting.values) is None


async def _put_back(engine: LiveEngine, state: State) -> None:
    """The values that the engine had before the first change. It may have ended: then there is nothing to put back."""
    try:
        refused = await engine.set(state.start)
    except EngineDead as error:
        print(f"the start values were not put back: {error}", file=sys.stderr)
        return
    state.set_last = state.start
    if state.runs:
        state.write()
    print(f"put back {_words(state.start)}" + (f": refused, {refused}" if refused else ""), file=sys.stderr)


def _words(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {values[name]:g}" for name in TUNED)


# --- the search ----------------------------------------------------------------------------------------------------


async def _search(
    search: Search, trials: Trials, engine: LiveEngine, state: State, max_seconds: float | None
) -> list[Run]:
    """Ask, make the run or take it from the state, answer; until the search ends or its time is up. Returns the runs
    that were asked for."""
    started, steps, answered = time.monotonic(), search.steps(), list[Run]()
    likely = report.likely_runs(search.space, search.limits)
    trial = next(steps, None)
    while trial is not None:
        known = state.runs.get(trial)
        if known is None and max_seconds is not None and time.monotonic() - started > max_seconds:
            print(f"--max-seconds {max_seconds:g} are over: the result is what was found until now", file=sys.stderr)
            break
        run = known or await _new_run(trials, engine, state, trial)
        answered.append(run)
        line = report.progress_line(
            run,
            search.limits,
            done=len(answered),
            likely=likely,
            elapsed=time.monotonic() - started,
            per_run=_seconds_per_run(state),
        )
        print(line + (" (from state.json)" if known else ""), file=sys.stderr)
        trial = _answer(steps, run)
    return answered


def _answer(steps: Steps, run: Run) -> Trial | None:
    """The next question; None: there is none."""
    try:
        return steps.send(run.seen)
    except StopIteration:
        return None


async def _new_run(trials: Trials, engine: LiveEngine, state: State, trial: Trial) -> Run:
    """Make a run and keep it. Raises EngineDead when the engine ended under it: what is kept says so."""
    state.set_last = trial.setting.values
    state.write()  # before the change, so that who resumes after a crash knows whose values these are
    run = await trials.make(engine, trial)
    if not state.runs:
        check_answers(run)
    state.add(run)
    if run.seen.refused == ENDED:
        raise EngineDead(
            f"{ENDED}: {_words(trial.setting.values)}. Repeat the command, with a URL after starting it again: it goes "
            f"on, and takes these values as not workable"
        )
    return run


def _seconds_per_run(state: State) -> float:
    seconds = [run.seconds for run in state.runs.values()]
    return sum(seconds) / len(seconds) if seconds else EXPECTED_RUN_SECONDS


# --- what is asked, and what is told -------------------------------------------------------------------------------


def _share_prefixes(arguments: argparse.Namespace, limits: Limits, block_size: int) -> None:
    """As the guide's script does: random prompts share as much as the wanted hits need, in whole blocks."""
    if not limits.min_cache_hit or arguments.dataset_name != "random" or arguments.random_prefix_len:
        return
    length = arguments.input_len or arguments.random_input_len
    shared = math.ceil(length * limits.min_cache_hit / block_size) * block_size
    if shared >= length:
        raise ConfigError(
            f"--min-cache-hit {limits.min_cache_hit:g} of {length} tokens is {shared} in whole blocks of {block_size}, "
            f"which leaves nothing that differs; raise --input-len or lower it"
        )
    arguments.random_prefix_len, arguments.input_len = shared, length - shared


def _settings(
    arguments: argparse.Namespace, limits: Limits, engine: LiveEngine, model: server.ServedModel
) -> dict[str, Any]:
    """All that a figure depends on, but the three values that are tuned. Equal settings have comparable runs."""
    others = {f"live {name}": value for name, value in engine.desired.items() if name not in TUNED}
    load = {name: getattr(arguments, name) for name in LOAD_FIELDS}
    path: Path | None = arguments.dataset_path
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path is not None and path.is_file() else None
    settings = {
        "version": version("trimtab"),
        "host": platform.node() if not is_url(arguments.model) else arguments.model,
        "model": [model.name, model.root, arguments.model],
        "serve_flags": arguments.serve_flags,
        "device_bytes": engine.device_bytes,
        **{name: engine.envelope.get(name) for name in ENVELOPE},
        **others,
        **load,
        "dataset_sha256": digest,
        "percentiles": limits.percentiles,
    }
    plain: dict[str, Any] = json.loads(json.dumps(settings))  # as the file gives it back
    return plain


def _facts(
    arguments: argparse.Namespace, engine: LiveEngine, model: server.ServedModel, place: Place
) -> dict[str, Any]:
    name = model.name if is_url(arguments.model) else Path(arguments.model).resolve().name
    length, output = (
        arguments.input_len or arguments.random_input_len,
        arguments.output_len or arguments.random_output_len,
    )
    lengths = f" of {length} + {output} tokens" if arguments.dataset_name == "random" else ""
    shared = f" after {arguments.random_prefix_len} shared ones" if arguments.random_prefix_len else ""
    return {
        "model": name,
        "url": place.url,
        "version": version("trimtab"),
        "load": f"{arguments.num_prompts} {arguments.dataset_name} prompts{lengths}{shared} a run",
        "envelope": {name: engine.envelope.get(name) for name in ENVELOPE},
        "device_bytes": engine.device_bytes,
        "start": engine.tuned,
    }


def _write(arguments: argparse.Namespace, search: Search, facts: dict[str, Any], runs: list[Run], folder: Path) -> None:
    setting, patch = report.found(search), None
    if setting is not None:
        about = "\n".join([f"Found by trimtab-engine autotune for {facts['load']}; limits: {search.limits}."])
        patch = resource_patch(setting, name=arguments.name, namespace=arguments.namespace, about=about)
        (folder / "patch.yaml").write_text(patch)
    else:
        (folder / "patch.yaml").unlink(missing_ok=True)  # one of an earlier search is no result of this one
    body = report.as_json(search, facts, runs)
    (folder / "report.json").write_text(json.dumps(body, indent=1) + "\n")
    (folder / "report.html").write_text(page(search, facts, runs, patch))
    print(json.dumps(body, indent=1) if arguments.output == "json" else report.table(search, facts, runs))
    names = ("report.json", "report.html", *(["patch.yaml"] if patch else []))
    print(f"wrote {', '.join(str(folder / name) for name in names)}", file=sys.stderr)
