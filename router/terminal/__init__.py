"""`router top` shows a running router in a terminal. It imports nothing of the server, so it starts at once."""
