"""Command lines `trimtab` and `trimtab-operator`."""
