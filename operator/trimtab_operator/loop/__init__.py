"""Read, decide, apply: Kopf's handlers and one turn of a resource."""
