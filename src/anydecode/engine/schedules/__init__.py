"""Schedules of the literature and of practice, each one class on the `Schedule` seam.

A schedule moves work between passes. Rows do not depend on their pass, so no schedule changes what
is said, only when.
"""
