"""Programmatic dependent launch: a kernel's CTAs start while the previous kernel still runs, and wait before they need
its results. Hopper and later (`backends`).

Rules for every kernel that is launched this way:
- All its CTAs wait (`gdc_wait`) before they read or write anything that another kernel writes, including arrival
counters. The wait ends when the previous kernel has ended and its writes are visible; that kernel has waited for its
own predecessor, so all earlier work is complete, as with ordinary launches.
- Before the wait, only weights may be read: several kernels may have been started ahead, so even the results of the
last kernel but one may be incomplete.
- `gdc_launch_dependents` is called first: the next kernel starts when every CTA of this one has started, so it never
takes the place of a CTA that has not.

A kernel without the option, before or after such a kernel, waits for all of it as usual.
"""

from typing import Any

import torch

from trimtab_kernels.launch.backends import kernel_backends
from trimtab_kernels.launch.device_facts import DeviceFacts, device_facts
from trimtab_kernels.launch.jit import tl

gdc_wait: Any = tl.extra.cuda.gdc_wait
gdc_launch_dependents: Any = tl.extra.cuda.gdc_launch_dependents
FIRST_CAPABILITY = 90


def dependence(device: torch.device, facts: DeviceFacts | None = None) -> dict[str, bool]:
    """Return the launch keywords: the kernel's DEPENDENT, and the launcher's option if it is enabled. The interpreter
    never launches ahead.
    """
    facts = facts or device_facts(device)
    if kernel_backends().dependent_launches and device.type != "cpu" and facts.capability >= FIRST_CAPABILITY:
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}
