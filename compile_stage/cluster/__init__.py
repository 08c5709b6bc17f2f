"""Several machines as one: which there are, what each has, and functions that run on one that fits (`pool.Pool`)."""
