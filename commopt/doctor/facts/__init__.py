"""What the checks ask about the machine, read once."""
