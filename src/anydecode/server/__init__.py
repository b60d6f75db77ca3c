"""The engine over HTTP, in OpenAI's shape: `create_app` makes the application, `serve` runs it."""
