"""Parallel layouts of one model: ranks, shards, experts, process groups and collectives."""
