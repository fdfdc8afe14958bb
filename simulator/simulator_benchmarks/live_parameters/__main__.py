"""What the tuner's hot knobs bring: `python -m simulator_benchmarks.live_parameters --traces FOLDER`. One replica, in virtual
time, beside the same load with nothing moved, or with the values that hindsight would choose.

```
scenes      clients that wait, on an engine that holds half of them: goodput under promises, Auto beside Off
storm       a load for which the KV cache is too small by half: how soon it is calm, and what first tokens take then
shifts      one mix of requests, another, the first again: goodput from 5 minutes after a shift, beside knobs that were
            switched at the border in hindsight
defaults    a steady load from the engine's defaults: the share of the gap to the best fixed values that is closed
stationary  a steady load from the best fixed values: what is lost by trying
```
The most turns of a knob's direction within 10 minutes are counted in all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from simulator_benchmarks.live_parameters.figures import Figure, markdown
from simulator_benchmarks.live_parameters.mixes import shifts, steady
from simulator_benchmarks.live_parameters.scenes import scenes
from simulator_benchmarks.live_parameters.storm import storm

SEEDS = "11,12,13"  # nothing was tuned on these

ROWS: dict[str, Callable[[Path, int], Iterator[Figure]]] = {
    "scenes": scenes,
    "storm": storm,
    "shifts": shifts,
    "steady": steady,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print each figure as JSON to stderr when it is there, and the table at the end."""
    parser = argparse.ArgumentParser(prog="python -m simulator_benchmarks.live_parameters", description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the development slice")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--seeds", default=SEEDS)
    given = parser.parse_args(arguments)
    names = given.rows.split(",")
    unknown = sorted(set(names) - set(ROWS))
    if unknown:
        parser.error(f"--rows has {', '.join(unknown)}; known are {', '.join(ROWS)}")
    figures = []
    for name in names:
        for seed in given.seeds.split(","):
            for figure in ROWS[name](given.traces, int(seed)):
                figures.append(figure)
                print(json.dumps(asdict(figure)), file=sys.stderr, flush=True)
    print(markdown(figures))


if __name__ == "__main__":
    main()
