"""Compression of keys and values."""
