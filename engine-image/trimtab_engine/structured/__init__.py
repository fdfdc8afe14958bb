"""Output that must match a grammar, by llguidance: the matcher of one request, its compilation, the masks of a step.

The API server makes and tries grammars (api/openai/constraints.py, trial.py); the engine core only sees tried ones.
"""
