"""Rewards: numbers for texts, by which search methods choose among them."""
