"""How bytes become KV blocks: the formula that the operator knows too, sizes at start, plans for other values."""
