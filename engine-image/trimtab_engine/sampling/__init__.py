"""Logits become token ids, on the host and on the device."""
