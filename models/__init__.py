"""Small real networks for the demo, the benchmarks and the tests."""
