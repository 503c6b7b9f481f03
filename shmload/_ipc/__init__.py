"""Child processes, and typed messages between processes over a Unix socket.

Guarantee: nothing that arrives is unpickled, every length has a limit, and what cannot be decoded
is a `ProtocolError`; every child is reaped. May import `_host` and below.
"""
