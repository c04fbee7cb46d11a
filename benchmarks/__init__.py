"""One module a headline: `python -m benchmarks.NAME [--quick]`; each says what its figures mean."""
