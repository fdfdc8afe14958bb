"""One `autotune` run from arguments to report; connects the other modules."""

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
from trimtab_engine.bench.autotune.engine import ENVELOPE, TUNED, EngineAddress, LiveEngine
from trimtab_engine.bench.autotune.limits import Limits
from trimtab_engine.bench.autotune.page import page
from trimtab_engine.bench.autotune.patch import resource_patch
from trimtab_engine.bench.autotune.search import Search, Steps, Trial
from trimtab_engine.bench.autotune.space import Space, build_space
from trimtab_engine.bench.autotune.state import Run, State, open_state
from trimtab_engine.bench.autotune.trials import ENDED, Interrupted, Trials, check_answers
from trimtab_engine.bench.inputs import check_folder, check_inputs, check_urls
from trimtab_engine.bench.local_server import SERVED_NAME, end_on_sigterm, local_server
from trimtab_engine.bench.serving import server
from trimtab_engine.bench.serving.run import request_headers
from trimtab_engine.errors import ConfigError, EngineDead
from trimtab_engine.model_files.json_files import CONFIG_FILE, read_json
from trimtab_engine.sources.name import remote_model
from trimtab_engine.weights.open import model_path

EXIT_NOT_FOUND, EXIT_INTERRUPTED = 1, 130
LOAD_FIELDS = (
    "dataset_name", "num_prompts", "input_len", "output_len", "random_input_len", "random_output_len",
    "random_prefix_len", "random_range_ratio", "prefix_repetition_prefix_len", "prefix_repetition_suffix_len",
    "prefix_repetition_num_prefixes", "prefix_repetition_output_len", "sharegpt_output_len", "custom_output_len",
    "backend", "seed", "temperature", "top_p", "top_k", "min_p", "ignore_eos", "extra_body", "burstiness",
)  # fmt: skip
"""Fields that must be equal for trials to be comparable."""
EXPECTED_RUN_SECONDS = 30.0  # before the first trial


def run_autotune(arguments: argparse.Namespace) -> int:
    """Search and report. Exit code: 0 found and confirmed, 1 no candidate meets the limits, 130 Ctrl-C."""
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
            shutil.rmtree(folder)  # only contains the log of a server that failed to start, whose last line is printed
        raise
    except (Interrupted, KeyboardInterrupt):
        state = folder / "state.json"
        then = f"the same command resumes from {state}" if state.exists() else "no run has finished"
        print(f"\ninterrupted; {then}", file=sys.stderr)
        return EXIT_INTERRUPTED


def _check(arguments: argparse.Namespace) -> None:
    """Validate the arguments before a server is started or contacted. Raises ConfigError."""
    request_headers(arguments)
    check_urls(arguments)
    check_inputs(arguments)
    if is_url(arguments.model):
        if arguments.admin_url is None:
            raise ConfigError(
                f"{arguments.model} requires the admin API; start the server with --admin-port PORT and "
                f"set --admin-url http://HOST:PORT"
            )
        if arguments.serve_flags:
            raise ConfigError("--serve-flags: only allowed with a MODEL; remove it")
        return
    try:
        shlex.split(arguments.serve_flags or "")
    except ValueError as error:
        raise ConfigError(f"--serve-flags {arguments.serve_flags!r}: {error}; close the quote") from None
    if remote_model(arguments.model) is None:
        _check_lengths(arguments, model_path(arguments.model))


def _check_lengths(arguments: argparse.Namespace, model: Path) -> None:
    """Check the lengths of random prompts and answers against the model's positions, before a server starts.

    Raises:
        ConfigError: They do not fit.
    """
    lengths = (arguments.input_len or arguments.random_input_len, arguments.output_len or arguments.random_output_len)
    if arguments.dataset_name != "random" or not model.is_dir() or None in lengths:
        return
    config = read_json(model / CONFIG_FILE, required=False)
    positions = config.get("text_config", config).get("max_position_embeddings")
    if isinstance(positions, int) and sum(lengths) > positions:
        raise ConfigError(
            f"--input-len {lengths[0]} and --output-len {lengths[1]}: together above the model's {positions} positions "
            f"({sum(lengths)}); set lower ones"
        )


async def _tune(arguments: argparse.Namespace, limits: Limits, folder: Path) -> int:
    async with _engine(arguments, folder) as place:
        await server.wait_until_ready(place.url, place.headers, arguments.ready_check_timeout_sec)
        model = await server.served_model(place.url, place.headers, arguments.served_model_name)
        engine = await LiveEngine.connect(place)
        space = _space(arguments, engine)
        _share_prefixes(arguments, limits, int(engine.envelope["block_size"]))
        state = open_state(folder / "state.json", _settings(arguments, limits, engine, model), engine.tuned)
        search = Search(space, limits, tries_all=arguments.all_candidates)
        facts = _facts(arguments, engine, model, place)
        kept = not is_url(arguments.model)  # our own server ends, so there is nothing to restore
        try:
            runs = await _search(search, Trials(arguments, limits, model), engine, state, arguments.max_seconds)
            kept = kept or (arguments.keep and await _apply_best(engine, search))
        finally:
            if not kept:
                await _restore(engine, state)
    _write(arguments, search, facts, runs, folder)
    return 0 if report.found(search) is not None else EXIT_NOT_FOUND


# --- engine ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _engine(arguments: argparse.Namespace, folder: Path) -> AsyncIterator[EngineAddress]:
    """Yield the address of the server at the URL, or start a server of the model for the duration of the search."""
    headers = request_headers(arguments)
    token = {"Authorization": f"Bearer {arguments.admin_token}"} if arguments.admin_token else {}
    if is_url(arguments.model):
        yield EngineAddress(arguments.model.rstrip("/"), arguments.admin_url.rstrip("/"), headers, token)
        return
    end_on_sigterm()
    print(f"starting {arguments.model}; log: {folder / 'server.log'}", file=sys.stderr)
    arguments.served_model_name = SERVED_NAME
    arguments.tokenizer = arguments.tokenizer or _folder(arguments.model)
    async with local_server(arguments.model, _serve_flags(arguments), folder / "server.log") as own:
        yield EngineAddress(own.url, own.admin_url, headers, token)


def _folder(model: str) -> str | None:
    """Return the model's folder, or None for other forms, whose path the server reports."""
    return model if Path(model).is_dir() else None


def is_url(text: str) -> bool:
    """Return True if it is the URL of a running server instead of a model."""
    return text.startswith(("http://", "https://"))


def _serve_flags(arguments: argparse.Namespace) -> list[str]:
    """Return the given flags, with caps that allow all candidates."""
    given = shlex.split(arguments.serve_flags or "")
    named = {flag.partition("=")[0] for flag in given}
    caps = {
        "--max-num-seqs-cap": max(arguments.num_seqs_list or [0]) or None,
        "--max-num-batched-tokens-cap": max(arguments.num_batched_tokens_list or [0]) or None,
        "--gpu-memory-utilization-cap": arguments.max_utilization,
    }
    return given + [word for flag, cap in caps.items() if cap and flag not in named for word in (flag, str(cap))]


def _space(arguments: argparse.Namespace, engine: LiveEngine) -> Space:
    """Return the space between the engine's start value (or the given minimum) and its cap."""
    cap = float(engine.envelope["gpu_memory_utilization_cap"])
    high = min(arguments.max_utilization or cap, cap)
    low = arguments.min_utilization or min(float(engine.tuned["gpu_memory_utilization"]), high)
    if low > high:
        raise ConfigError(f"--min-utilization {low:g} is above {high:g}, the maximum of this engine")
    return build_space(
        num_seqs=arguments.num_seqs_list,
        budgets=arguments.num_batched_tokens_list,
        num_seqs_cap=int(engine.envelope["max_num_seqs_cap"]),
        budget_cap=int(engine.envelope["max_num_batched_tokens_cap"]),
        utilization=(low, math.floor(high * 100 + 1e-9) / 100),
    )


async def _apply_best(engine: LiveEngine, search: Search) -> bool:
    """Set the engine to the best values. Return False if there are none."""
    setting = report.found(search)
    return setting is not None and await engine.set(setting.values) is None


async def _restore(engine: LiveEngine, state: State) -> None:
    """Restore the values that the engine had before the first change, unless it has ended."""
    try:
        refused = await engine.set(state.start)
    except EngineDead as error:
        print(f"failed to restore the start values: {error}", file=sys.stderr)
        return
    state.set_last = state.start
    if state.runs:
        state.write()
    print(f"restored {_format_values(state.start)}" + (f": rejected, {refused}" if refused else ""), file=sys.stderr)


def _format_values(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {values[name]:g}" for name in TUNED)


# --- search ---------------------------------------------------------------------------------------------------------


async def _search(
    search: Search, trials: Trials, engine: LiveEngine, state: State, max_seconds: float | None
) -> list[Run]:
    """Run trials, or take their results from the state, until the search or its time ends. Return the runs."""
    started, steps, answered = time.monotonic(), search.steps(), list[Run]()
    likely = report.estimate_num_runs(search.space, search.limits)
    trial = next(steps, None)
    while trial is not None:
        known = state.runs.get(trial)
        if known is None and max_seconds is not None and time.monotonic() - started > max_seconds:
            print(f"--max-seconds {max_seconds:g} reached; reporting the results so far", file=sys.stderr)
            break
        run = known or await _run_trial(trials, engine, state, trial)
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
        trial = _next_trial(steps, run)
    return answered


def _next_trial(steps: Steps, run: Run) -> Trial | None:
    """Return the next trial, or None at the end."""
    try:
        return steps.send(run.seen)
    except StopIteration:
        return None


async def _run_trial(trials: Trials, engine: LiveEngine, state: State, trial: Trial) -> Run:
    """Run and record a trial. Raises EngineDead if the engine ended during it, which is recorded too."""
    state.set_last = trial.setting.values
    state.write()  # before the change, so that a resumed search recognizes these values after a crash
    run = await trials.make(engine, trial)
    if not state.runs:
        check_answers(run)
    state.add(run)
    if run.seen.refused == ENDED:
        raise EngineDead(
            f"{ENDED}: {_format_values(trial.setting.values)}. Repeat the command (with a URL, restart the server "
            "first) to continue; these values are marked as not working"
        )
    return run


def _seconds_per_run(state: State) -> float:
    seconds = [run.seconds for run in state.runs.values()]
    return sum(seconds) / len(seconds) if seconds else EXPECTED_RUN_SECONDS


# --- settings -------------------------------------------------------------------------------------------------------


def _share_prefixes(arguments: argparse.Namespace, limits: Limits, block_size: int) -> None:
    """Set the shared prefix of random prompts to the required hit rate, in whole blocks, as vLLM's auto_tune script
    does.
    """
    if not limits.min_cache_hit or arguments.dataset_name != "random" or arguments.random_prefix_len:
        return
    length = arguments.input_len or arguments.random_input_len
    shared = math.ceil(length * limits.min_cache_hit / block_size) * block_size
    if shared >= length:
        raise ConfigError(
            f"--min-cache-hit {limits.min_cache_hit:g} of {length} tokens is {shared} in whole blocks of {block_size}, "
            f"the whole prompt; raise --input-len or lower --min-cache-hit"
        )
    arguments.random_prefix_len, arguments.input_len = shared, length - shared


def _settings(
    arguments: argparse.Namespace, limits: Limits, engine: LiveEngine, model: server.ServedModel
) -> dict[str, Any]:
    """Return all settings that affect a result, except the three tuned values. Runs with equal settings are
    comparable.
    """
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
    plain: dict[str, Any] = json.loads(json.dumps(settings))  # as read back from the file
    return plain


def _facts(
    arguments: argparse.Namespace, engine: LiveEngine, model: server.ServedModel, place: EngineAddress
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
        (folder / "patch.yaml").unlink(missing_ok=True)  # not a result of this search
    body = report.as_json(search, facts, runs)
    (folder / "report.json").write_text(json.dumps(body, indent=1) + "\n")
    (folder / "report.html").write_text(page(search, facts, runs, patch))
    print(json.dumps(body, indent=1) if arguments.output == "json" else report.table(search, facts, runs))
    names = ("report.json", "report.html", *(["patch.yaml"] if patch else []))
    print(f"wrote {', '.join(str(folder / name) for name in names)}", file=sys.stderr)
