"""Oracle tests of the methods that control a fleet."""
