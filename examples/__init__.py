"""Tutorials: each file runs by itself and is tested."""
