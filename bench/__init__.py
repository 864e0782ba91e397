"""Benchmarks of commopt, and the emulated cluster they run on."""
