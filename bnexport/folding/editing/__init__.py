"""Planning, checking and application of parameter changes."""
