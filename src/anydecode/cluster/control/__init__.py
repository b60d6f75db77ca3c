"""The methods that control a fleet: roles of its workers, and their number."""
