"""Arithmetic on rows: a signature per operation, its torch reference, and faster backends."""
