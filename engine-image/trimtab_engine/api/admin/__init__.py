"""Admin API on its own port: live configuration, memory, drains, profiles."""
