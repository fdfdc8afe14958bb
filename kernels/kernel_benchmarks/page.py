"""Generation of docs/results/gpu.md and gpu.svg from gpu.json: targets and measurements."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kernel_benchmarks.report import Entry, Report

UNITS = {"copy": "TB/s", "read": "TB/s", "bf16": "TFLOP/s", "fp8": "TFLOP/s", "sheet": "TFLOP/s", "model": "tokens/s"}
LIMITS = {
    "copy": "copy",
    "read": "read",
    "bf16": "bf16 GEMMs",
    "fp8": "fp8 GEMMs",
    "fp8 precise": "fp8 GEMMs with sums in float32",
    "sheet": "bf16 by the data sheet",
    "model": "the model's, computed from copy and bf16",
    "time": "all the time",
    "seconds": "",
}
TERA = 1e12
MEMORY_BOUND = (
    "rms_norm", "rope", "rotary", "silu", "reshape", "copy_blocks", "argmax", "sample", "edit_logits",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """One target: its description, and the rows that belong to it. Rows without a bar are shown without a target."""

    what: str
    bar: str
    answers: Callable[[str], bool]


TARGETS = (
    Target("paged decode attention, 64k tokens or more in all", "0.85 of copy", lambda n: n.startswith("paged_decode")),
    Target(
        "prefill attention, 8k, causal, heads of 128", "0.60 of 990 TFLOP/s", lambda n: n.startswith("paged_prefill")
    ),
    Target(
        "memory-bound kernels",
        "0.90 of copy",
        lambda n: n.startswith(MEMORY_BOUND),
    ),
    Target("GEMMs of up to 16 rows, bf16", "0.80 of read", lambda n: n.startswith("skinny_gemm")),
    Target("adapters added to GEMMs", "none", lambda n: n.startswith("lora")),
    Target("attention over latent vectors", "none", lambda n: n.startswith("latent")),
    Target("layers of few rows, ordinary and dependent launches", "0.85 of read", lambda n: " layers of " in n),
    Target(
        "fp8 block GEMM", "0.70 of fp8 from 1024 tokens, 0.80 of read up to 32", lambda n: n.startswith("w8a8_block")
    ),
    Target("fused MoE", "0.65 of the binding limit", lambda n: n.startswith("fused_moe")),
    Target("Llama-3.1-8B decode, 1, 32, 256 at 1k", "0.90, 0.85, 0.75 of the limit", lambda n: " decode " in n),
    Target("Llama-3.1-8B prefill", "0.70 of the limit", lambda n: n.endswith(" prefill")),
    Target("nano-vllm's workload, Qwen3-0.6B and 8B", "0.60 of the ideal", lambda n: "workload" in n),
    Target("GPU busy at 32 requests", "0.97", lambda n: "GPU busy" in n),
    Target("live KV resize of 10 GiB under load", "stall of 200 ms at most", lambda n: "KV resize" in n),
)


def meets(row: Entry) -> bool | None:
    """Return True if the target is met, False if not, None without a target or a figure."""
    if "error" in row:
        return False
    if row.get("limit") == "seconds":
        return bool(row["seconds"] <= row["bar"])
    if not row.get("bar") or "share" not in row:
        return None
    return bool(row["share"] >= row["bar"])


def write_pages(report: Report, folder: Path) -> bool:
    """Write both files. Returns False if matplotlib is missing; then there is no plot."""
    drawn = plot(report.rows, folder / "gpu.svg")
    (folder / "gpu.md").write_text(markdown(report, with_plot=drawn))
    return drawn


def markdown(report: Report, *, with_plot: bool) -> str:
    """Return the page: a summary by target, then each row with its peers."""
    about = report.identity
    limits = ", ".join(f"{LIMITS[name]} {value / TERA:.3g} T/s" for name, value in report.limits.items())
    drift = ", ".join(
        f"{LIMITS[name]} {value / report.limits[name] - 1:+.1%}"
        for name, value in report.limits_at_end.items()
        if name in report.limits and name != "sheet"
    )
    versions = f"torch {about.get('torch')}, triton {about.get('triton')}, Python {about.get('python')}"
    dates = sorted({row["date"] for row in report.rows.values() if "date" in row})
    span = " to ".join(dates[:1] + dates[1:][-1:])
    lines = [
        "# Measured on a GPU",
        "",
        f"Made by `{report.command}`; do not edit. {about.get('device')}, {versions}; {span}.",
        f"Limits of the newest run: {limits}. Shares are of the limits measured in a row's own run."
        + (f" At its end: {drift}." if drift else ""),
        "",
        *(["![shares of the limits](gpu.svg)", ""] if with_plot else []),
        "| measurement | target | rows that meet it | shares |",
        "| --- | --- | --- | --- |",
        *[_summary(target, report.rows) for target in TARGETS],
        _compilations(report.rows),
        "",
        "| row | Trimtab | share | target | limit | peers |",
        "| --- | --- | --- | --- | --- | --- |",
        *[_line(name, row) for name, row in report.rows.items()],
    ]
    return "\n".join(lines) + "\n"


def _summary(target: Target, rows: dict[str, Entry]) -> str:
    found = [row for name, row in rows.items() if target.answers(name)]
    verdicts = [verdict for row in found if (verdict := meets(row)) is not None]
    has_bar = target.bar != "none"
    shares = [row["share"] for row in found if "share" in row and bool(row.get("bar")) == has_bar]
    spread = f"{min(shares):.2f} to {max(shares):.2f}" if shares else ""
    if not shares:
        spread = ", ".join(_ours(row) for row in found if row.get("limit") == "seconds" and "error" not in row)
    met = f"{sum(verdicts)} of {len(verdicts)}" if verdicts else f"{len(shares)} measured" if shares else "not measured"
    return f"| {target.what} | {target.bar} | {met} | {spread} |"


def _compilations(rows: dict[str, Entry]) -> str:
    """Summarise the engine's rows without compilations: a row in which a kernel was compiled is an error."""
    compiled = sum(row.get("error", "").startswith("Compiled") for row in rows.values())
    none = sum("kernel_compilations" in row for row in rows.values())
    met = f"{none} of {none + compiled}" if none + compiled else "not measured"
    return f"| no kernel compiled after warm-up | 0 in every row of the engine | {met} |  |"


def _line(name: str, row: Entry) -> str:
    share = f"{row['share']:.3f}" if "share" in row else ""
    mark = {True: " ✓", False: " ✗", None: ""}[meets(row)] if share else ""
    bar = f"{row['bar']:.2f}" if row.get("bar") and row.get("limit") != "seconds" else ""
    peers = "; ".join(f"{peer}: {_peer(entry, row)}" for peer, entry in row.get("peers", {}).items())
    return f"| {name} | {_ours(row)} | {share}{mark} | {bar} | {LIMITS.get(row.get('limit', ''), '')} | {peers} |"


def _ours(row: Entry) -> str:
    if "error" in row:
        return f"failed: {_cell(row['error'])}"
    if row.get("limit") == "seconds":
        return f"{1e3 * row['seconds']:.0f} ms of {1e3 * row['bar']:.0f} allowed"
    if row.get("limit") == "model":
        return f"{row['rate']:,.0f} tokens/s"
    if "seconds" not in row:
        return "" if "share" in row else "not measured"
    return f"{1e6 * row['seconds']:.1f} µs, {row['rate'] / TERA:.3g} {UNITS[row['limit']]}"


def _peer(entry: Entry, row: Entry) -> str:
    if "not_run" in entry:
        return f"not run ({_cell(entry['not_run'])})"
    if "rate" in entry:
        times = f", Trimtab {row['rate'] / entry['rate']:.2f} times as fast" if "rate" in row else ""
        return f"{entry['rate']:,.0f} tokens/s{times}"
    if row.get("limit") == "seconds":
        return f"{entry['seconds']:.1f} s"
    times = f", Trimtab {entry['seconds'] / row['seconds']:.2f} times as fast" if "seconds" in row else ""
    return f"{1e6 * entry['seconds']:.1f} µs{times}"


def _cell(text: str) -> str:
    """Return one line without table separators."""
    return " ".join(text.replace("|", "/").split())


def plot(rows: dict[str, Entry], path: Path) -> bool:
    """Plot shares of the limit as bars, with the targets. Returns False if matplotlib is missing."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return False
    shown = [(name, row["share"], row.get("bar", 0.0)) for name, row in rows.items() if "share" in row]
    figure = Figure(figsize=(9, 0.28 * len(shown) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(shown))
    axes.barh(places, [share for _, share, _ in shown], color=["#2a7" if s >= b else "#c73" for _, s, b in shown])
    axes.plot([bar for _, _, bar in shown], places, "k|", markersize=12, label="target")
    axes.set_yticks(list(places), [name for name, _, _ in shown], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("share of the limit measured in the same run")
    axes.legend()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "trimtab"}):
        figure.savefig(path, metadata={"Date": None})
    return True
