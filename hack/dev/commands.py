"""The commands of `python3 hack/dev`."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys

from cluster import target
from cluster.bring_up import bring_up
from devtools import model, stage_log
from devtools.progress import log_line, stage
from offline import leftovers

from . import announcement, machine_facts, set_up


def set_up_parts(arguments: argparse.Namespace) -> int:
    plan = announcement.CommandPlan(
        command=arguments.command_of_make or "set-up",
        parts=frozenset(arguments.parts),
        then=arguments.then or "then",
        then_seconds=arguments.then_seconds,
        workers=arguments.workers,
        keeps=os.environ.get("KEEP", "") not in ("", "0"),
        current=target.uses_current(),
    )
    if arguments.command_of_make:
        machine = machine_facts.inspect(arguments.name)
        print(announcement.first_line(machine, plan), file=sys.stderr, flush=True)
        if arguments.dry_run:
            print("\n".join(announcement.details(machine, plan)))
            print("nothing was done (DRY_RUN=1)", file=sys.stderr)
    if not arguments.dry_run:
        set_up.ensure(plan.parts, lambda: bring_up(arguments.name, arguments.workers))
        if not arguments.command_of_make and "model" in plan.parts:
            print(f"next: source .venv/bin/activate && trimtab serve {model.folder()}")
    return 0


def run_stage(arguments: argparse.Namespace) -> int:
    """Run a program as a stage, without status lines, since its output shows its progress."""
    code = 0
    with contextlib.suppress(_Failed), stage(arguments.title, arguments.about, quietly=True):
        code = subprocess.run(arguments.words, check=False).returncode
        if code != 0:
            raise _Failed
    return code


class _Failed(Exception):
    """A stage's program failed; its own output has the reason."""


def took(_: argparse.Namespace) -> int:
    log_line(stage_log.summary(stage_log.recorded(), stage_log.elapsed()))
    stage_log.remove_old_records()
    return 0


def show_leftovers(_: argparse.Namespace) -> int:
    found = leftovers.find()
    print("\n".join(found) if found else "no leftovers: no container, daemon, mount or process")
    return 1 if found else 0
