"""Choice of the dynamic dimensions of an exported model."""
