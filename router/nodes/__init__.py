"""The nodes: connections to them, membership, and how nodes join, drain and die."""
