"""Programmatic dependent launch: a kernel's programs are started while the kernel before it still runs, and wait where
they first need what it writes. Hopper and later (`switches`).

What holds for every kernel that is launched so:
- All its programs wait (`gdc_wait`) before they read or write anything that another kernel writes, counters of arrivals
  included. The wait ends when the kernel before has ended and what it wrote is seen; that one has waited for its own
  predecessor, so everything before is done as well, just as where launches come one after another.
- Before the wait only weights may be read: several kernels may have been started ahead, so that even what the kernel
  before the last one writes is not there yet.
- `gdc_launch_dependents` comes first: the next kernel starts when every program of this one has begun, so it never
  takes the place of one that has not.

A kernel without the option behind or before such a one waits for all of it, as ever.
"""

from typing import Any

import torch

from trimtab_kernels.launch.device_facts import DeviceFacts, device_facts
from trimtab_kernels.launch.jit import tl
from trimtab_kernels.launch.switches import ways

gdc_wait: Any = tl.extra.cuda.gdc_wait
gdc_launch_dependents: Any = tl.extra.cuda.gdc_launch_dependents
FIRST_CAPABILITY = 90


def dependence(device: torch.device, facts: DeviceFacts | None = None) -> dict[str, bool]:
    """Keywords of a launch: the kernel's DEPENDENT, and the launcher's option where it is on. The interpreter starts
    nothing ahead."""
    facts = facts or device_facts(device)
    if ways().dependent_launches and device.type != "cpu" and facts.capability >= FIRST_CAPABILITY:
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}
