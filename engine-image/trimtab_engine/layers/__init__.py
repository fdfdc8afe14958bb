"""Building blocks that architectures share. Plain callables: inference needs no module tree."""
