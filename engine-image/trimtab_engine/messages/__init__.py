"""Messages between API servers and engine cores, by channel."""
