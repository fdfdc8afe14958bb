"""Output of `trimtab plan`: a ranking of layouts as a table or JSON (docs/guides/layout-planning.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.box import HEAVY_HEAD
from rich.table import Table

from trimtab_operator.layout.cost import PIPELINE_BALANCE
from trimtab_operator.layout.facts import ModelFacts
from trimtab_operator.layout.gpus import GIB
from trimtab_operator.layout.memory_fit import Envelope, memory_fit
from trimtab_operator.layout.ranking import Cluster, Load, Objective, Ranking, RejectedLayout, Row
from trimtab_operator.layout.reasons import reason_for
from trimtab_operator.layout.rules import Problem
from trimtab_operator.layout.stored_weights import as_loaded, unsupported_reason
from trimtab_operator.resource.spec import Parallelism

MAX_LISTED = 4  # degrees in one cell


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPlan:
    """Inputs of a plan with the resulting ranking."""

    facts: ModelFacts
    cluster: Cluster
    envelope: Envelope
    load: Load
    objective: Objective
    ranking: Ranking


def to_json(planned: LayoutPlan, *, limit: int, with_rejected: bool) -> dict[str, Any]:
    """Return the plan as JSON; `rows` are the best `limit` rows, `num_rows` is the total."""
    answer: dict[str, Any] = {
        **_question(planned),
        "num_rows": len(planned.ranking.rows),
        "rows": [_row(planned, place, row) for place, row in enumerate(planned.ranking.rows[:limit], start=1)],
    }
    if with_rejected:
        answer["refused"] = [_refused(refused) for refused in planned.ranking.refused]
    return answer


def _question(planned: LayoutPlan) -> dict[str, Any]:
    facts, cluster, envelope = planned.facts, planned.cluster, planned.envelope
    held = as_loaded(facts, cluster.hardware.gpu, envelope.quantization)
    return {
        "model": facts.model,
        "architecture": facts.architecture,
        "supported": facts.supported,
        "num_parameters": facts.num_parameters,
        "weights_bytes": facts.weights_bytes,
        "held_weights_bytes": held.weights_bytes,
        "held_as": held.quantization or held.dtype,
        "gpu": cluster.hardware.gpu.name,
        "gpu_memory_bytes": cluster.hardware.gpu.memory_bytes,
        "gpus_per_node": cluster.gpus_per_node,
        "nodes": cluster.nodes,
        "objective": planned.objective,
        "assumed": {
            "gpu_memory_utilization": envelope.gpu_memory_utilization,
            "max_model_len": envelope.max_model_len,
            "max_num_seqs": envelope.max_num_seqs,
            "max_num_batched_tokens": envelope.max_num_batched_tokens,
            "block_size": envelope.block_size,
            "kv_dtype_bytes": envelope.kv_dtype_bytes,
            "quantization": envelope.quantization,
            "prompt_tokens": planned.load.prompt_tokens,
            "output_tokens": planned.load.output_tokens,
            "network_gigabits": cluster.hardware.network_gigabits,
            "pipeline_balance": PIPELINE_BALANCE,
        },
    }


def _row(planned: LayoutPlan, place: int, row: Row) -> dict[str, Any]:
    return {
        "place": place,
        **_degrees(row.parallelism),
        "pods": row.pods,
        "gpus": row.gpus,
        "replicas": row.replicas,
        "used_gpus": row.used_gpus,
        "weights_bytes_per_gpu": row.fit.weights_bytes,
        "kv_tokens": row.fit.kv_tokens,
        "max_concurrency": round(row.fit.max_concurrency, 2),
        "min_gpu_memory_utilization": row.fit.min_utilization,
        "requests_per_engine": row.estimate.requests_per_engine,
        "step_seconds": row.estimate.step.seconds,
        "single_request_step_seconds": row.estimate.single_step_seconds,
        "exchange_share": round(row.estimate.step.exchange_share, 4),
        "tokens_per_second": round(row.estimate.tokens_per_second, 1),
        "reason": reason_for(row, planned.facts, planned.cluster, planned.envelope),
        "spec": {
            "parallelism": row.parallelism.model_dump(by_alias=True, exclude_none=True),
            "replicas": row.replicas,
        },
    }


def _refused(refused: RejectedLayout) -> dict[str, Any]:
    problems = [{"field": p.field, "value": p.value, "limit": p.limit, "message": str(p)} for p in refused.problems]
    return {**_degrees(refused.parallelism), "problems": problems}


def _degrees(parallelism: Parallelism) -> Mapping[str, Any]:
    return {
        "tensor": parallelism.tensor,
        "pipeline": parallelism.pipeline,
        "data": parallelism.data,
        "expert": parallelism.expert,
        "gpus_per_node": parallelism.gpus_per_node,
    }


def heading(planned: LayoutPlan) -> str:
    """Return the inputs and assumptions of the plan."""
    facts, cluster, envelope = planned.facts, planned.cluster, planned.envelope
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)}"
    held = as_loaded(facts, cluster.hardware.gpu, envelope.quantization)
    model = (
        f"{facts.model}: {facts.architecture}, {facts.num_parameters / 1e9:.2f} billion parameters, "
        f"{held.weights_bytes / GIB:.1f} GiB of weights ({held.quantization or held.dtype})"
    )
    question = (
        f"{nodes} with {cluster.gpus_per_node} × {cluster.hardware.gpu.name}, of which "
        f"{envelope.gpu_memory_utilization} of the memory is used; requests of up to {envelope.max_model_len} tokens, "
        f"on average {planned.load.prompt_tokens} prompt and {planned.load.output_tokens} output tokens"
    )
    lines = [model, question]
    if not facts.is_run_on("cuda"):
        lines.append(f"Note: Trimtab's engine does not run {unsupported_reason(facts)}; validation rejects it")
    if facts.refusal and facts.quantization is None:
        lines.append("Note: the weights are counted as unquantized")
    return "\n".join(lines)


def rows_table(planned: LayoutPlan, *, limit: int, narrow: bool = False) -> Table:
    """Return the table of the best rows. Times and rates are estimates for comparing rows. A narrow table has no lines
    and no reasons; `reasons` lists them below it.
    """
    mixture = planned.facts.is_moe
    table = Table(
        header_style="bold",
        expand=False,
        box=None if narrow else HEAVY_HEAD,
        padding=(0, 1, 0, 0) if narrow else (0, 1),
    )
    for name in ("", "TP", "PP", *(("DP", "EP") if mixture else ()), "GPUs × replicas"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("weights/GPU", "KV tokens", "requests", "batch", "step", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    if not narrow:
        table.add_column("why", overflow="fold")
    for place, row in enumerate(planned.ranking.rows[:limit], start=1):
        p = row.parallelism
        pods = f" in {row.pods} pods" if row.pods > 1 else ""
        table.add_row(
            str(place),
            str(p.tensor),
            str(p.pipeline),
            *((str(p.data), "yes" if p.expert else "no") if mixture else ()),
            f"{row.gpus}{pods} × {row.replicas}",
            f"{row.fit.weights_bytes / GIB:.1f} GiB",
            f"{row.fit.kv_tokens:,}",
            f"{row.fit.max_concurrency:.1f}",
            f"{row.estimate.requests_per_engine:,}",
            f"{1000 * _shown_step(planned, row):.1f} ms",
            f"{row.estimate.tokens_per_second:,.0f}",
            *(() if narrow else (_why(planned, row),)),
        )
    return table


def reasons(planned: LayoutPlan, *, limit: int) -> list[str]:
    """Return the reasons of the best rows, one line each."""
    return [f"{place}: {_why(planned, row)}" for place, row in enumerate(planned.ranking.rows[:limit], start=1)]


def _why(planned: LayoutPlan, row: Row) -> str:
    return reason_for(row, planned.facts, planned.cluster, planned.envelope)


def _shown_step(planned: LayoutPlan, row: Row) -> float:
    """Return the step time: of a single request if the objective is latency, else of the full batch."""
    return row.estimate.single_step_seconds if planned.objective == "latency" else row.estimate.step.seconds


def legend(planned: LayoutPlan) -> str:
    """Return the meaning of each column, one line each."""
    load = "one request runs" if planned.objective == "latency" else "the batch runs"
    meanings = {
        "weights/GPU": "weights on the rank with the most",
        "KV tokens": "KV cache size of one engine",
        "requests": "concurrent requests of the maximum length per engine",
        "batch": f"average-length requests per engine, at most max_num_seqs {planned.envelope.max_num_seqs}",
        "step": f"time per output token when {load}",
        "tokens/s": "throughput of all GPUs",
    }
    width = max(map(len, meanings))
    lines = [f"{name:<{width}}  {meaning}" for name, meaning in meanings.items()]
    return "\n".join([*lines, "Times and rates are estimates for comparing rows."])


def rejected_table(planned: LayoutPlan) -> Table:
    """Return the table of rejected layouts, grouped by reason. Of the layouts without enough memory, the one that lacks
    the least is shown.
    """
    table = Table(title="Rejected", title_justify="left", header_style="bold", expand=False)
    for name in ("layouts", "TP", "PP", "DP", "EP"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for group in rejected_by_reason(planned):
        layouts = [refused.parallelism for refused in group]
        problems = [p for p in group[0].problems if _lacks_memory(group[0]) or all(p in r.problems for r in group)]
        why = "\n".join(f"{problem.field.removeprefix('spec.parallelism.')} {problem}" for problem in problems)
        table.add_row(
            str(len(group)),
            _listed({p.tensor for p in layouts}),
            _listed({p.pipeline for p in layouts}),
            _listed({p.data for p in layouts}),
            " or ".join("yes" if expert else "no" for expert in sorted({p.expert for p in layouts})),
            ("closest: " if len(group) > 1 and _lacks_memory(group[0]) else "") + why,
        )
    return table


def rejected_by_reason(planned: LayoutPlan) -> list[list[RejectedLayout]]:
    """Group rejected layouts by their first problem, in order of their first layouts. Lack of memory is one group,
    sorted by the missing bytes.
    """
    groups: dict[Problem | None, list[RejectedLayout]] = {}
    for refused in planned.ranking.refused:
        groups.setdefault(None if _lacks_memory(refused) else refused.problems[0], []).append(refused)
    if None in groups:
        groups[None].sort(key=lambda refused: _missing_bytes(planned, refused.parallelism))
    return list(groups.values())


def _lacks_memory(refused: RejectedLayout) -> bool:
    return any(problem.field == "spec.parallelism" for problem in refused.problems)


def _missing_bytes(planned: LayoutPlan, parallelism: Parallelism) -> int:
    rank = memory_fit(planned.facts, parallelism, planned.cluster.hardware.gpu, planned.envelope).tightest
    return rank.needed_bytes - rank.formula.requested_bytes


def _listed(degrees: set[int]) -> str:
    """Return the degrees as text; only the first and the last if there are many."""
    ordered = sorted(degrees)
    shown = ordered if len(ordered) <= MAX_LISTED else [ordered[0], "…", ordered[-1]]
    return " ".join(map(str, shown))
