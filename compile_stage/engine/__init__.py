"""Where steps run: workers, as processes here or elsewhere."""
