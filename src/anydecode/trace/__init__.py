"""The record of a generation as an HTML view."""
