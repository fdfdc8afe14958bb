"""Architectures: one file each. Which exist is said in model_config.py, which can be read without torch."""
