"""The processes of `router`: a supervisor, one or more routers on one port, and the nodes of this machine."""
