"""`router top`: a running router, seen from a terminal. Nothing here imports what serves, so it starts at once."""
