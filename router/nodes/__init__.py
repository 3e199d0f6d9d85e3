"""The nodes: connections, membership, who joins, drains and dies, and those of this machine."""
