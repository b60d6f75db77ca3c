"""Tool calls: the formats of model families, and the constraint that enforces them."""
