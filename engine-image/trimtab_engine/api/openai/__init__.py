"""OpenAI's surface: what a request may say, how it is planned, answered and streamed."""
