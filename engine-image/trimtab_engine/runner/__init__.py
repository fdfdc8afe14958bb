"""A batch becomes logits: input tensors, the forward pass, and the graphs that replay it."""
