"""Generic HTTP: listening, bodies, request identity, errors in OpenAI's format, event streams. Independent of the
API.
"""
