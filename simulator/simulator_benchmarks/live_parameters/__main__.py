"""Effect of the tuner's live parameters: `python -m simulator_benchmarks.live_parameters --traces FOLDER`.

One replica in virtual time, compared with the same load without changes, or with the best values in hindsight.

```
scenes      closed-loop clients on an engine that holds half of them: goodput within objectives, Auto and Off
storm       a load for which the KV cache is too small by half: seconds until preemption ends, and TTFT after that
shifts      one mix of requests, another, the first again: goodput from 5 minutes after a shift, compared with
            parameters that were switched at the border in hindsight
defaults    a steady load from the engine's defaults: the closed share of the gap to the best fixed values
stationary  a steady load from the best fixed values: the loss by trials
```
All of them report the maximum number of direction changes of a parameter within 10 minutes.
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

SEEDS = "11,12,13"  # not used for tuning

ROWS: dict[str, Callable[[Path, int], Iterator[Figure]]] = {
    "scenes": scenes,
    "storm": storm,
    "shifts": shifts,
    "steady": steady,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print each figure as JSON to stderr, and the table at the end."""
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
