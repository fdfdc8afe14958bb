"""The contract between router and engine: prefix keys and the messages of the state stream."""
