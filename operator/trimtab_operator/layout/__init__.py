"""How a model is laid over devices: what a replica needs, whether it can work, what it would cost. Pure; no I/O.

`replica` says how many pods and devices a spec asks for. `facts` is what is known of a model, `gpus` of devices.
`check` refuses layouts that cannot work, by number.
"""

from trimtab_operator.layout.replica import Layout, layout_of

__all__ = ["Layout", "layout_of"]
