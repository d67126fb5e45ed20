"""Reports of a fold: data, tables and an HTML page."""
