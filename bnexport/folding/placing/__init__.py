"""Find the operators that can absorb a map."""
