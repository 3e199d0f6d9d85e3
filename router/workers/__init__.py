"""Several router processes on one port."""
