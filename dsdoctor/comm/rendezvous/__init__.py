"""How ranks find each other: the store, the board on it, and which ranks did not come."""
