"""The HTTP side of the engine: OpenAI's surface, probes, metrics and the admin API. It knows no tensor."""
