"""Routers of the simulation: a plain Service, published rules of other routers, and Trimtab's own scoring code."""

from trimtab_simulator.plant.routing.router import Router, RouterKind, RouterSettings, router_of

__all__ = ["Router", "RouterKind", "RouterSettings", "router_of"]
