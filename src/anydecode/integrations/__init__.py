"""Adapters for other frameworks."""
