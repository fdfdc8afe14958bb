"""Anthropic's Messages API, as a format of chat requests."""
