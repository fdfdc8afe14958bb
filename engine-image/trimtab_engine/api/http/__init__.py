"""HTTP that knows nothing of what is served: listening, bodies, identities, errors in OpenAI's form, event streams."""
