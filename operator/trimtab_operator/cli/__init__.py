"""The command lines `trimtab` and `trimtab-operator`."""
