"""JSON Schema: compilation, validation, and completion of answers."""
