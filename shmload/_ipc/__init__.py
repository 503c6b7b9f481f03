"""Messages between processes: typed frames over a Unix socket.

Guarantee: nothing that arrives is unpickled, every length has a limit, and what cannot be decoded
is a `ProtocolError`. May import `_host` and below.
"""
