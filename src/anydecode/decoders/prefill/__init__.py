"""Other ways to compute a prompt's context; what decodes behind it is any method.

They are lossy: what a prompt leaves in memory is less than what it was.
"""
