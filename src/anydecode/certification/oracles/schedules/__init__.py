"""Oracle tests of the schedules."""
