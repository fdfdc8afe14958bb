"""Processes and the pipes between them: who ends with whom, frames on a stream, workers with a time limit."""
