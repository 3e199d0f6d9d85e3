"""Sequences between their dispatch and their end: where they go, what has arrived, what is counted."""
