"""Recipes of trainings that have a card, by key. They need no torch."""
