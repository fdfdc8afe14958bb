"""Models of the Hugging Face hub, by name: resolved to a commit, fetched into a cache that engines may share."""
