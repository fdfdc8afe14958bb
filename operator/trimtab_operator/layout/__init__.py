"""How a model is laid over devices: what a replica needs, whether it can work, what it would cost. Pure; no I/O.

`replica` says how many pods and devices a spec asks for. `facts` is what is known of a model (`config_facts` from its
config.json alone), `gpus` of devices. `rules` are the engine's own, by number; `stages` and `memory_fit` say what each
rank holds; `nearest` finds what would work instead; `check` puts them together.
"""

from trimtab_operator.layout.replica import Layout, layout_of

__all__ = ["Layout", "layout_of"]
