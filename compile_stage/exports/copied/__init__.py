"""Files that are copied into exports, where a server loads them; nothing here imports them."""
