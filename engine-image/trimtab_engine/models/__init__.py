"""Models: a file for each family, the registry that names them, and what they share."""
