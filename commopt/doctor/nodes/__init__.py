"""The same facts of all nodes, side by side."""
