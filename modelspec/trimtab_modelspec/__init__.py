"""Model facts, memory formula, KV groups and partitioning: one implementation for operator, engine and simulator.

Reads config.json dictionaries and returns values. Imports no torch, no numpy and no other package of Trimtab.
"""
