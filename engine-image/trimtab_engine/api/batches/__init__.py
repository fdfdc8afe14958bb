"""OpenAI's Files and Batches APIs: requests in a file, answered when the engine has room, and kept across restarts."""
