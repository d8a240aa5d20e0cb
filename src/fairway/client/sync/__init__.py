"""The client for programs without a loop: methods block where they must.

client       `connect`, and the client
consumer     a member of a group
connection   one connection to a server, and the outcomes of what is sent there
cluster      sends and asks in a cluster, and waits for several broker groups
forwarder    the process-forward producer
"""
