"""Schedules from papers and from practice, each a subclass of `Schedule`.

A schedule moves work between passes. The results of rows do not depend on the pass that they run
in, so a schedule changes the timing but not the generated text.
"""
