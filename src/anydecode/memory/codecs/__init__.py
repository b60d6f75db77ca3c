"""Forms in which keys and values take less room."""
