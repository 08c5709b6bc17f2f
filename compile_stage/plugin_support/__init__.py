"""What several plug-ins share, and nothing else stands on: fixed shapes, artifacts, PyTorch programs. Copied into
bundles as far as their backend needs it."""
