"""Write the generated pages of docs/reference and docs/llms.txt, or verify them with --check."""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
import yaml
from trimtab_engine import cli as engine_cli
from trimtab_engine.flags.parser import UnsupportedFlag
from trimtab_engine.flags.vllm import OtherFlag, vllm_flags
from trimtab_operator.builders import record
from trimtab_operator.cli import operator_command, trimtab_command
from trimtab_operator.cli.completion import APPLICATION
from trimtab_operator.cli.engine_program import ENGINE_COMMANDS
from trimtab_operator.layout.gpus import GPUS
from trimtab_operator.resource import crd
from trimtab_operator.resource.spec import GROUP, VERSION
from trimtab_router.flags import build_parser as build_router_parser
from trimtab_router.metrics import GAUGES, METRIC_LABELS, PREFIX, RouterMetrics

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
COMMAND = "`make reference`"
WIDTH = 118
CAPPED = tuple(record.CAPPED_FIELDS.values())  # parameters whose bound is a cap of the engine


def row(*cells: str) -> str:
    """Return one row of a table; a bar within a cell is escaped."""
    return "| " + " | ".join(re.sub(r"\s+", " ", cell).strip().replace("|", "\\|") for cell in cells) + " |"


def table(*titles: str) -> list[str]:
    """Return the two header lines of a table."""
    return [row(*titles), row(*["---"] * len(titles))]


def wrapped(page: str) -> str:
    """Return a page whose lines of prose fit a screen, without double empty lines."""
    lines = []
    for line in page.splitlines():
        is_prose = len(line) > WIDTH and not line.startswith(("|", "- ["))
        lines += textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False) if is_prose else [line]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip("\n") + "\n"


def sentence(text: str) -> str:
    """Return a help text without markup characters that Markdown would interpret."""
    return re.sub(r"(?<!`)([<>*])", r"\\\1", text.strip())


# --- the resource -----------------------------------------------------------------------------------------------------


def effect_of(path: str) -> str:
    """Return how a change of a field reaches running engines."""
    top, _, rest = path.partition(".")
    if top == "tuning" and rest.startswith("bounds.") and rest.split(".")[1] in CAPPED and rest.endswith(".max"):
        return "rolling"
    if path == "tuning.mode":
        return 'live; rolling from or to `"Off"` if a bound has no `max`'
    if path == "rollout.drainTimeout":
        return "rolling"
    if top == "engine" and rest in CAPPED:
        return "live up to the cap, else rolling"
    if top == "engine" and rest in record.LIVE_FIELDS:
        return "live"
    return "live" if top in record.NOT_RENDERED else "rolling"


def constraints_of(schema: dict[str, Any]) -> str:
    """Return the limits of a field in words."""
    found = []
    if "enum" in schema:
        found.append(", ".join(f"`{value}`" for value in schema["enum"]))
    if "minimum" in schema or "maximum" in schema:
        found.append(f"{schema.get('minimum', '')} … {schema.get('maximum', '')}".strip())
    if schema.get("pattern") and len(schema["pattern"]) <= 40:
        found.append(f"`{schema['pattern']}`")
    return "; ".join(found)


def fields_of(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the schema of every field, depth first."""
    for name, inner in schema.get("properties", {}).items():
        path = f"{prefix}.{name}" if prefix else name
        yield path, inner
        yield from fields_of(inner, path)
        if "items" in inner:
            yield from fields_of(inner["items"], f"{path}[]")


def resource_page() -> str:
    """Return the page with all fields of spec and status."""
    version = crd.definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    lines = [
        "# InferenceDeployment fields",
        "",
        f"This page lists every field of the API `{GROUP}/{VERSION}`. {COMMAND} generates it from the CRD.",
        "[InferenceDeployment](resource.md) explains how fields act together.",
        "",
        "A *live* change reaches running engines without a restart. A *rolling* change replaces replicas.",
        "",
    ]
    spec = version["spec"]
    for top, schema in spec["properties"].items():
        lines += [f"## spec.{top}", "", schema.get("description", ""), ""]
        if "properties" not in schema:
            lines += [
                f"Default: `{schema['default']}`." if "default" in schema else "",
                f"Change: {effect_of(top)}.",
                "",
            ]
            continue
        lines += table("field", "type", "default", "values", "change", "description")
        for path, inner in fields_of(schema, top):
            if "properties" in inner and not inner.get("description"):
                continue
            default = f"`{inner['default']}`" if "default" in inner and inner["default"] != {} else ""
            kind = inner.get("type", "integer or string")
            leaf = "properties" not in inner
            lines.append(
                row(
                    f"`{path.partition('.')[2]}`",
                    kind,
                    default if leaf else "",
                    constraints_of(inner),
                    effect_of(path) if leaf else "",
                    sentence(inner.get("description", "")),
                )
            )
        lines.append("")
    lines += ["## status", "", *table("field", "type", "description")]
    for path, inner in fields_of(version["status"]):
        lines.append(row(f"`{path}`", inner.get("type", ""), sentence(inner.get("description", ""))))
    return "\n".join(lines) + "\n"


# --- command lines ----------------------------------------------------------------------------------------------------


def engine_page() -> str:
    """Return the page with the flags of every subcommand of the engine."""
    lines = [
        "# Engine flags",
        "",
        f"This page lists the flags of `trimtab-engine`. {COMMAND} generates it from the argument parser.",
        "[Engine contract](contract.md#1-command-line) adds exit codes and signals.",
        "",
    ]
    for name, parser in subparsers(engine_cli._parser()):
        lines += [f"## {name}", "", sentence(parser.description or ""), "", *flag_tables(parser, f"### {name}: ")]
    lines += ["## vLLM's other flags", "", VLLM_FLAGS, "", *table("flag", "effect")]
    for entry in sorted(vllm_flags(), key=lambda entry: entry.names):
        values = f" other than {' or '.join(f'`{v}`' for v in entry.harmless)}" if entry.harmless else ""
        effect = f"none: {entry.reason}" if entry.is_ignored else f"rejected{values}; {entry.reason}"
        lines.append(row(", ".join(f"`{name}`" for name in entry.names), effect))
    return "\n".join(lines) + "\n"


def flag_tables(parser: argparse.ArgumentParser, title: str) -> Iterator[str]:
    """Yield the lines of one table for each group of flags; `title` precedes the group's name."""
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.help is not argparse.SUPPRESS and a.dest != "help"]
        if not actions or any(isinstance(action, argparse._SubParsersAction) for action in actions):
            continue
        yield from (f"{title}{group.title}", "", *table("flag", "description"))
        yield from (row(f"`{spelling(action)}`", sentence(help_of(parser, action))) for action in actions)
        yield ""


def router_page() -> str:
    """Return the page with the flags and the metrics of the router."""
    lines = [
        "# Router flags and metrics",
        "",
        f"This page lists the flags and metrics of `trimtab-router`. {COMMAND} generates it.",
        "[Use the router](../guides/router.md) explains them.",
        "",
        "## Flags",
        "",
        *flag_tables(build_router_parser(), "### "),
        "## Metrics",
        "",
        "`GET /metrics` on the admin port, summed over all worker processes. Names begin with `trimtab_router_`.",
        "",
        *table("metric", "type", "description"),
    ]
    for family in RouterMetrics().registry.collect():
        name = family.name.removeprefix(PREFIX)
        suffix = "_total" if family.type == "counter" else ""
        lines.append(row(metric_name(name + suffix, METRIC_LABELS.get(name, ())), family.type, family.documentation))
    lines += [row(metric_name(name, labels), "gauge", text) for name, (text, labels) in GAUGES.items()]
    return "\n".join(lines) + "\n"


def metric_name(name: str, labels: tuple[str, ...]) -> str:
    """Return a metric's name with its labels."""
    return f"`{name}{{{','.join(labels)}}}`" if labels else f"`{name}`"


def engine_flags() -> str:
    """Return the flags of `serve` as JSON for the operator (validation/engine_flags.py)."""
    entries: list[dict[str, Any]] = []
    for action in engine_cli._parser().command("serve")._actions:
        if not action.option_strings or action.dest == "help":
            continue
        names = sorted(action.option_strings, key=lambda name: not name.startswith("--"))
        values = {0: "none", "?": "optional", "+": "many", "*": "many", None: "one"}
        entry: dict[str, Any] = {"names": names, "value": values[action.nargs]}
        kind = VALUE_KINDS.get(getattr(action.type, "__name__", ""))
        entry |= {"kind": kind} if kind else {}
        entry |= {"choices": [str(choice) for choice in action.choices]} if action.choices else {}
        if isinstance(action, OtherFlag):
            treatment = "ignored" if action.entry.is_ignored else "rejected"
            entry |= {treatment: action.entry.reason, "harmless": action.entry.harmless}
        entries.append(entry)
    lines = ",\n".join(json.dumps(entry) for entry in sorted(entries, key=lambda entry: str(entry["names"][0])))
    return f"[\n{lines}\n]\n"


def completion_tree() -> str:
    """Return the commands, flags and values of `trimtab` as JSON (cli/completion.py)."""
    group: Any = typer.main.get_command(trimtab_command.app)
    engine = completion_of_parser(engine_cli._parser())["commands"]
    commands = {
        name: engine[name] if name in ENGINE_COMMANDS else completion_of_command(command)
        for name, command in group.commands.items()
        if not command.hidden
    }
    tree = completion_of_command(group) | {"commands": commands}
    return json.dumps(tree, indent=1) + "\n"


def completion_of_parser(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the completions of an engine command: flags with their values, or null for switches."""
    node: dict[str, Any] = {"commands": {}, "flags": {}, "arguments": []}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            node["commands"] = {name: completion_of_parser(inner) for name, inner in action.choices.items()}
        elif not isinstance(action, UnsupportedFlag):
            values = None if action.nargs == 0 else [str(choice) for choice in action.choices or ()]
            node["flags"] |= dict.fromkeys(action.option_strings, values)
    return node


def completion_of_command(command: Any) -> dict[str, Any]:
    """Return the completions of a command of `trimtab`."""
    node: dict[str, Any] = {"commands": {}, "flags": {"--help": None}, "arguments": []}
    for parameter in command.params:
        choices = getattr(parameter.type_descriptor.annotation, "__members__", {})  # of an enum
        values: Any = [str(choice.value) for choice in choices.values()]
        if parameter._custom_shell_complete:
            values = APPLICATION
        if parameter.param_type_name == "argument":
            node["arguments"] = node["arguments"] or values
        else:
            values = None if parameter.is_flag else VALUES.get(parameter.opts[0], values)
            node["flags"] |= dict.fromkeys((*parameter.opts, *parameter.secondary_opts), values)
    return node


def subparsers(parser: argparse.ArgumentParser, prefix: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield every subcommand with its parser, nested ones too."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield f"{prefix}{name}", inner
                yield from subparsers(inner, f"{prefix}{name} ")


def spelling(action: argparse.Action) -> str:
    """Return the names of a flag with its value, or the name of a positional argument."""
    if not action.option_strings:
        return str(action.metavar or action.dest)
    value = "" if action.nargs == 0 else " " + str(action.metavar or action.dest.upper())
    return ", ".join(action.option_strings) + value


def help_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the help of a flag, with its default filled in."""
    return parser._get_formatter()._expand_help(action) if action.help else ""


def cli_page() -> str:
    """Return the page with the options of `trimtab` and `trimtab-operator`."""
    lines = [
        "# Command line tools",
        "",
        f"This page lists the commands of `trimtab` and `trimtab-operator`. {COMMAND} generates it.",
        "`serve`, `bench`, `autotune`, `fetch` and `inspect` belong to the engine: [engine flags](engine-flags.md).",
        "`kubectl trimtab` is the same program as `trimtab`.",
        "",
    ]
    for program, app in (("trimtab", trimtab_command.app), ("trimtab-operator", operator_command.app)):
        group: Any = typer.main.get_command(app)
        for name, command in group.commands.items():
            if command.hidden or command.context_settings.get("ignore_unknown_options"):
                continue
            lines += [f"## {program} {name}", "", sentence(command.help or ""), ""]
            lines += table("option", "default", "description")
            for parameter in command.params:
                if parameter.name in ("help", "install_completion", "show_completion"):
                    continue
                is_argument = parameter.param_type_name == "argument"
                names = ", ".join([*parameter.opts, *parameter.secondary_opts])
                names = parameter.name.upper() if is_argument else names
                default = parameter.default
                shown = (
                    ""
                    if default in (None, False, (), []) or callable(default)
                    else f"`{getattr(default, 'value', default)}`"
                )
                lines.append(row(f"`{names}`", shown, sentence(getattr(parameter, "help", "") or "")))
            lines.append("")
    return "\n".join(lines)


# --- the chart --------------------------------------------------------------------------------------------------------


def helm_page() -> str:
    """Return the page with the values of the chart, from the comments of values.yaml."""
    lines = [
        "# Helm values",
        "",
        f"This page lists the values of `charts/trimtab`. {COMMAND} generates it from `values.yaml`.",
        "",
        *table("value", "default", "description"),
    ]
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    source = (REPOSITORY / "charts/trimtab/values.yaml").read_text()
    values = yaml.safe_load(source)
    for line in source.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.lstrip("# ").removeprefix("-- "))
            continue
        found = re.match(r"( *)([\w.]+):", line)
        if found is None:
            comment = []
            continue
        depth = len(found[1])
        path = [*(entry for entry in path if entry[0] < depth), (depth, found[2])]
        names = [name for _, name in path]
        value: Any = values
        for name in names:
            value = value[name] if isinstance(value, dict) else None
        if not isinstance(value, dict) or not value or "{" in line:
            shown = (
                ""
                if value in ("", None)
                else f"`{yaml.safe_dump(value, default_flow_style=True, width=1000).splitlines()[0]}`"
            )
            lines.append(row(f"`{'.'.join(names)}`", shown, sentence(" ".join(comment))))
        elif comment:
            lines.append(row(f"`{'.'.join(names)}`", "", sentence(" ".join(comment))))
        comment = []
    return "\n".join(lines) + "\n"


# --- the list of pages ------------------------------------------------------------------------------------------------


class NavigationLoader(yaml.SafeLoader):
    """Reads mkdocs.yml without the Python objects that it names."""


NavigationLoader.add_multi_constructor("tag:yaml.org,2002:python", lambda *_: None)


def llms_page() -> str:
    """Return docs/llms.txt: the navigation as a plain list."""
    site = yaml.load((REPOSITORY / "mkdocs.yml").read_text(), NavigationLoader)
    lines = ["# Trimtab", "", f"> {site['site_description']}"]

    def add(items: list[dict[str, Any]], depth: int) -> None:
        for title, target in (entry for item in items for entry in item.items()):
            if isinstance(target, str):
                lines.extend(
                    [f"- [{title}]({target})"] if lines[-1].startswith(("- ", "#")) else ["", f"- [{title}]({target})"]
                )
            else:
                if depth == 0:
                    lines.extend(["", f"## {title}", ""])
                add(target, depth + 1)

    add(site["nav"], 0)
    return "\n".join(lines) + "\n"


VLLM_FLAGS = (
    "`serve` knows the flags of vLLM's parser that it does not have. Some have no effect, which it logs; others are "
    "rejected, all of them in one message. Underscores in flags are read as dashes."
)
VALUE_KINDS = {
    **dict.fromkeys(("int", "positive", "not_negative", "port", "threads", "api_servers"), "integer"),
    **dict.fromkeys(("float", "seconds", "fraction"), "number"),
}
"""Argument types of the engine's parser whose values are plain numbers."""
ENGINE_FLAGS = DOCS.parent / "operator" / "trimtab_operator" / "validation" / "engine_flags.json"
COMPLETION = DOCS.parent / "operator" / "trimtab_operator" / "cli" / "completion.json"
VALUES = {"--gpu": [gpu.name for gpu in GPUS]}
"""Values of flags whose type has no choices."""

PAGES = {
    "reference/resource-fields.md": resource_page,
    "reference/engine-flags.md": engine_page,
    "reference/router.md": router_page,
    "reference/cli.md": cli_page,
    "reference/helm-values.md": helm_page,
    "llms.txt": llms_page,
}


def main() -> int:
    """Write the pages; with --check, return 1 if one differs."""
    check = "--check" in sys.argv[1:]
    stale = []
    texts = {DOCS / name: wrapped(page()) for name, page in PAGES.items()}
    texts |= {ENGINE_FLAGS: engine_flags(), COMPLETION: completion_tree()}
    for path, text in texts.items():
        if path.is_file() and path.read_text() == text:
            continue
        stale.append(str(path.relative_to(DOCS.parent)))
        if not check:
            path.write_text(text)
    if stale and check:
        print(f"{', '.join(stale)}: out of date; run `make reference`", file=sys.stderr)
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())
