"""The user-facing API: the `LLM` class, requests and their results."""
