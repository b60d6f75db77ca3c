"""Serving under a real load: traces, their replay, and what is made of the times."""
