"""`router plan --measure`: runs the real parts of a node on this machine, and fits what they cost.

command      flags, and what the terminal shows
phases       the phases one after the other, and the profile that they make
forwards     prefill and decode on the real engine, under the real scheduler (`node_loop`)
transfer     pages between two processes
fitting      from rounds to coefficients, residuals and remarks
"""
