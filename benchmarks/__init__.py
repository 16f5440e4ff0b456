"""Measurements: each module prints one table (`--json`: a list of rows) and asserts nothing."""
