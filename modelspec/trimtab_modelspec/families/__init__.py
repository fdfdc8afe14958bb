"""Model families: how config.json is read and which tensors a checkpoint has, one module per family."""
