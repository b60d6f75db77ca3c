"""Oracle tests of trainings."""
