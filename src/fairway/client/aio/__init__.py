"""The client for asyncio programs: the modules of `fairway.client.sync`, awaited.

client       `connect`, and the client
consumer     a member of a group
connection   one connection to a server, and the awaitable outcomes of what is sent there
cluster      sends and asks in a cluster, and waits for several broker groups
forwarder    the process-forward producer
"""
