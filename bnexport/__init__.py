"""bnexport: from a model trained with sync batch norm to one that runs anywhere, fast."""
