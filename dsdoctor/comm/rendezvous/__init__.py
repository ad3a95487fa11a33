"""How ranks find each other: the store, and who never came."""
