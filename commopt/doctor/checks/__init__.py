"""The checks, one file per group; diagnosis has them in the order of repair."""
