"""Architectures: one file each. This module only says which exist, so that it can be read without torch."""

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)
