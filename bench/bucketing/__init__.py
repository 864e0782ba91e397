"""Adaptive buckets against every bucket_cap_mb that one could have tried by hand: `python -m bench.bucketing`."""
