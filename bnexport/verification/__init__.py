"""Do two models compute the same? Runs both and gives one verdict."""
