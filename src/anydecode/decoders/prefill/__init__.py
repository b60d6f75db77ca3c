"""Methods that compress the prompt's part of the key-value cache; any decoder generates after it.

They are lossy: the cache holds less than the full prompt.
"""
