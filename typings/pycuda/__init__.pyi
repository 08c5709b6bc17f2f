"""What compile-stage calls of PyCUDA, as its wrapper's source defines it; the package can't be built without CUDA."""
