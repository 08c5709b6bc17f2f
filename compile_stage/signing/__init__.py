"""How a bundle is signed, and what is said of it in statements and a bill of materials."""
