"""Inter-process helpers: process lifetimes, framed streams, workers with a time limit, shared secrets."""
