"""Speculative decoding: a cheap proposer guesses tokens, and the model checks all of them in one step."""
