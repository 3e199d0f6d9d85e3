"""`router plan --measure`: runs the real parts of a node on this machine, and fits what they cost."""
