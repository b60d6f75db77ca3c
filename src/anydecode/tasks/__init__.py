"""Prompts, and tasks whose answers can be checked."""
