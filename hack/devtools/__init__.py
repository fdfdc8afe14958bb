"""Shared code of the development tools: cache, processes, progress lines, the virtual environment and the sample model.

It needs only Python's standard library, so it works before the project's virtual environment exists.
"""
