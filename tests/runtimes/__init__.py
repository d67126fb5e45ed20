"""Exported files in the runtimes that people deploy to, each in an environment of its own; `make campaign RUN=runtimes`."""
