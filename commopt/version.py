"""The one place that states the version; the build reads it from here. Beside it, what that was tested with."""

__version__ = "0.1.0"

NEWEST_TESTED_TORCH = "2.13"  # that of constraints.txt
