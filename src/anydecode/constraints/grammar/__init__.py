"""Automata over bytes, and grammars over canvases."""
