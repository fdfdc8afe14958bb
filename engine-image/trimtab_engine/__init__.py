"""The Trimtab engine: an LLM server whose memory and batch knobs are live."""
