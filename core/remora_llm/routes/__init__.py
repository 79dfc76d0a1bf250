"""OpenAI's routes in the server: services that turn requests into tasks of language models."""
