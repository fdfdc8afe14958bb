"""`trimtab-engine inspect MODEL`: the model facts of docs/contract.md section 6, from headers only."""

import argparse
import json
from typing import Any


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="print what a model is: layers, heads, sizes",
        description="Print the facts of a model from its headers, without loading it.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder with safetensors, or a .gguf file")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="default: table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from trimtab_engine.inspect_model import model_facts

    facts = model_facts(arguments.model)
    if arguments.output == "json":
        print(json.dumps(facts, indent=2))
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"{name:<{width}}  {value}")
    return 0
