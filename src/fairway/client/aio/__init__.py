"""The client for asyncio programs: the modules of `fairway.client.sync`, awaited.

client       `connect`, and the client
consumer     a member of a group
connection   connections to one server or to a cluster, and the awaitable outcomes of what is sent there
forwarder    the process-forward producer
"""
