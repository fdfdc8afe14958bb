"""The first law: it sees preemptions alone, and moves knobs one way. It steers until `decide` does."""
