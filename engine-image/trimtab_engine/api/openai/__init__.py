"""OpenAI-compatible API: request validation, planning, responses and streaming."""
