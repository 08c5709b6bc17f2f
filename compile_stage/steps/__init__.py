"""One file = one step = one function, record in, record out."""
