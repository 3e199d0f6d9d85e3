"""HTTP itself: the server and its bounds, bodies in, answers out, keys and ids."""
