"""A fleet in virtual time: the real engine, schedules and protocol over a model that computes
nothing."""
