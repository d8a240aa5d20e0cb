"""The client for asyncio programs: the modules of `fairway.client.sync`, awaited.

client       `connect`, and the client
consumer     a member of a group
receipts     the awaitable results of `send`, and `client.delayed`
connection   one connection to a server
cluster      sends and asks in a cluster, and waits for several broker groups
forwarder    the process-forward producer
coalescing   merges equal requests among the tasks of a loop
"""
