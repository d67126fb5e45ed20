"""Decide which dimensions of an exported model are dynamic."""
