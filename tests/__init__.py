"""Tests; a package so that `tests.ranks` also serves the benches."""
