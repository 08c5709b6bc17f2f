"""The functions that `compile_stage.api` offers, a file each kind: each opens the surroundings that it needs, and calls
what does the work."""
