"""What `compile-stage debug` does."""
