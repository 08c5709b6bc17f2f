"""What a skilled user of each peer does by hand with a network, written from the peer's documentation. One file for
each peer; `benchmarks/by_hand.py` measures them beside the stage's winner."""
