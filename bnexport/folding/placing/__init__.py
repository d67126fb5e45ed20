"""Search for the operators that absorb a map."""
