"""How the workers of one router talk to each other."""
