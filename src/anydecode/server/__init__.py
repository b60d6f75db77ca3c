"""An OpenAI-compatible HTTP server: `create_app` builds the ASGI application, `serve` runs it."""
