"""Plan, check and apply changes of parameters."""
