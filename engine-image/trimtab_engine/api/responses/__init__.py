"""OpenAI's Responses API, as a format of chat requests."""
