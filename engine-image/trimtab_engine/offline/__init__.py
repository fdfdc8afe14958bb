"""In-process engine: `from trimtab_engine import LLM, SamplingParams`."""
