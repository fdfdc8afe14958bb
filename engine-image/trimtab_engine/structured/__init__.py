"""Grammar-constrained output with llguidance: matcher of one request, compilation, and token masks of a step.

The API server builds and validates grammars (api/openai/constraints.py, validation.py); the engine core only gets
validated ones.
"""
