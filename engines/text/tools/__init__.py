"""Tool calls in a model's own words to pieces a client can use: one file a family, one registry line each."""
