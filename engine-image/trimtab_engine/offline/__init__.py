"""The engine in the caller's own process: `from trimtab_engine import LLM, SamplingParams`."""
